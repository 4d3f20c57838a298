"""The names of the arguments of cases; their values are made in the process that runs a case."""

import pytest


@pytest.fixture
def subject() -> None:
    """The device that is tested: a ``Subject``."""


@pytest.fixture
def device() -> None:
    """The rank's ``torch.device``, registered and made current."""


@pytest.fixture
def other_device() -> None:
    """The ``torch.device`` after that."""


@pytest.fixture
def rank() -> None:
    """The process's number in its group."""


@pytest.fixture
def directory() -> None:
    """An empty directory, the same for all ranks: a ``Path``."""

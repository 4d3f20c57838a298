"""The names of the arguments of cases; their values are made in the process that runs a case."""

import pytest


@pytest.fixture
def subject() -> None:
    """The method that is tested, with its parameters: a ``Subject``."""


@pytest.fixture
def method() -> None:
    """The class that derives from ``BasePeft``."""


@pytest.fixture
def models() -> None:
    """Models that the method can adapt: ``Models``."""


@pytest.fixture
def rank() -> None:
    """The process's number in its group."""


@pytest.fixture
def directory() -> None:
    """An empty directory, the same for all ranks: a ``Path``."""

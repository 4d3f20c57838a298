"""The names of the arguments of cases; their values are made in the process that runs a case."""

import pytest


@pytest.fixture
def strategy() -> None:
    """The strategy that is tested: a class that derives from ``BaseDistributed``."""


@pytest.fixture
def loop() -> None:
    """What a training loop does with the strategy on this rank: ``Loop``."""


@pytest.fixture
def rank() -> None:
    """The process's number in its group."""


@pytest.fixture
def directory() -> None:
    """An empty directory, the same for all ranks: a ``Path``."""

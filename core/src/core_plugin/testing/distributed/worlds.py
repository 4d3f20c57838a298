"""On how many ranks a case runs."""

import pytest


def _world(size: int) -> object:
    marks = [pytest.mark.ranks(size), *([pytest.mark.only("several")] if size > 1 else [])]
    return pytest.param(size, marks=marks, id=f"{size}_ranks" if size > 1 else "1_rank")


def worlds(*sizes: int) -> pytest.MarkDecorator:
    """Run a case on each of the numbers of ranks, those above one if the strategy is for them."""
    return pytest.mark.parametrize("world_size", [_world(size) for size in sizes])

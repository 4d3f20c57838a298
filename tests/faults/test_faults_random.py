"""Runs that are killed at random moments end as if nothing had been.

``FAULT_SEEDS="137 12"`` takes other seeds than the gate's; ``nox -s faults`` takes 200.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HARNESS = Path(__file__).parent / "harness"
SEEDS = [int(seed) for seed in os.environ.get("FAULT_SEEDS", " ".join(map(str, range(20)))).split()]
JOBS = 6


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=pytest.mark.xdist_group(f"faults-{s % JOBS}")) for s in SEEDS]
)
def test_a_run_that_is_interrupted_at_random_ends_as_if_it_had_not_been(faulty, monkeypatch, seed):
    monkeypatch.syspath_prepend(HARNESS)
    from random_harness import Plan, RandomRun, disk

    plan = Plan.drawn(seed)
    try:
        with disk(faulty.workspace.path / "run") as place:
            run = RandomRun(faulty, plan, place)
            try:
                run.complete()
            finally:
                faulty.workspace.end()
                print(f"seed {seed}: {', '.join(run.ends)}")
    except BaseException as error:
        error.add_note(f"seed {seed}: {plan}\nthis run again: nox -s faults -- {seed}")
        raise

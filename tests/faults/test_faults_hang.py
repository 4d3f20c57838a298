"""Ranks that stand still are found, named, and ended."""

from __future__ import annotations

import re
import socket
import time

import pytest

TIMEOUT = 3.0
LAUNCHER = {"name": "torchrun", "processes_per_host": 2}


def job(faulty, *hooks, **changes):
    document = faulty.job(hooks=["jsonl", *hooks], **changes)
    return document | {"train": document["train"] | {"hang_timeout": TIMEOUT}}


def fault(what, rank, **more):
    return {"name": "faults", "step": 3, "rank": rank, "what": what} | more


def rows(output):
    """The table's rows: rank, step, and the rest."""
    return [m.groups() for m in re.finditer(r"^  (\d+)  +(\S+)  +(.+)$", output, re.MULTILINE)]


@pytest.mark.parametrize(
    ("what", "rank", "phase", "place"),
    [
        ("sleep", 1, "on_step of the hooks", r"recorder\.py:\d+ _sleep$"),
        ("loop in data", 0, "step", r"recorder\.py:\d+ _loop$"),
        ("stop", 0, "silent", "stopped, gone, or in C code"),
    ],
)
def test_a_hang_is_reported_with_the_rank_and_the_place(faulty, what, rank, phase, place):
    command = faulty.start(job(faulty, fault(what, rank)), 2)
    assert faulty.reaches(3 if what == "loop in data" else 2), command.output
    began = time.monotonic()
    code, output = command.wait(40)
    assert code == 1, output
    assert time.monotonic() - began < 4 * TIMEOUT + 10
    assert output.count("error:") == 1, output
    assert (
        f"no progress for 3 seconds (train.hang_timeout); the others probably wait for rank {rank}"
        in output
    )
    assert "Traceback" not in output
    culprit, other = rows(output)
    assert culprit[0] == str(rank)
    assert re.search(place, culprit[2]), output
    assert phase in culprit[2]
    assert other[0] == str(1 - rank)
    assert other[2].endswith("(waits for other ranks)"), output


def test_after_a_hang_the_run_is_started_again(faulty):
    expected = faulty.train(faulty.job(), 2, directory="undisturbed")
    document = job(faulty, fault("sleep", 1, once=True), launcher=LAUNCHER | {"max_restarts": 1})
    command = faulty.start(document, 2)
    code, output = command.wait()
    assert code == 0, output
    assert "the others probably wait for rank 1" in output
    assert [m["loss"] for m in faulty.workspace.metrics()] == [m["loss"] for m in expected]


def test_a_stopped_rank_that_keeps_the_store_is_found_as_well(faulty):
    """Without an agent, the store that the ranks talk through is rank 0's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2"} | {"MASTER_PORT": port}
    document = job(faulty, fault("stop", 0), launcher="local")
    ranks = [
        faulty.start(document, 1, **environment, SLURM_PROCID=str(r), SLURM_LOCALID=str(r))
        for r in range(2)
    ]
    code, output = ranks[1].wait(40)
    assert code == 1, output
    assert "the others probably wait for rank 0" in output
    assert [row[0] for row in rows(output)] == ["0", "1"]
    assert "silent" in rows(output)[0][2]


def test_c_code_that_keeps_the_interpreter_is_found(faulty):
    document = job(faulty, fault("hold", 0), distributed="none")
    code, output = faulty.start(document, 1).wait(40)
    assert code == 1, output
    assert re.search(r"recorder\.py\", line \d+ in _hold", output)


def test_a_rank_may_wait_for_one_that_is_slow_but_moves(faulty):
    """Rank 0 reads data and calls hooks, each for less than the timeout, both for more."""
    slow = {"name": "slow", "seconds": 0.6 * TIMEOUT, "reads": 2}
    document = job(faulty, slow)
    document["train"] |= {"steps": 3, "log_every": 3}
    faulty.train(document, 2)


def test_a_save_in_the_background_may_take_longer_than_the_timeout(faulty):
    slow = {"name": "slow", "seconds": 0.4 * TIMEOUT, "reads": 3}
    document = job(faulty, slow, {"name": "slow-disk", "step": 3, "until": 6})
    document["checkpoint"] |= {"asynchronous": True, "every": 3}
    assert len(faulty.train(document, 2)) == 6

"""Workers that die are replaced, and the run goes on as if they had not."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

ONE = {"name": "torchrun", "processes_per_host": 1, "max_restarts": 1}
TWO = ONE | {"processes_per_host": 2}
LONG = {"steps": 100_000, "global_batch_size": 2, "micro_batch_size": 1}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_worker_is_replaced_every_time(faulty, times):
    launcher = {"name": "torchrun", "processes_per_host": 2, "max_restarts": times}
    document = faulty.job("fsdp2", launcher=launcher, scheduler="constant", train=LONG)
    command = faulty.start(document | {"checkpoint": {"every": 5}}, 2)
    moment = random.Random(times)
    for _ in range(times):
        done = len(faulty.workspace.metrics())
        assert faulty.reaches(done + 6), command.output
        time.sleep(moment.random() / 5)
        workers = command.workers()
        os.kill(workers[moment.randrange(2)], signal.SIGKILL)
        assert faulty.soon(lambda killed=workers: not {*killed} & {*command.workers()})
    done = len(faulty.workspace.metrics())
    assert faulty.reaches(done + 6), command.output
    os.kill(command.pid, signal.SIGTERM)
    code, output = command.wait()
    assert code == 75, output
    assert "Traceback" not in output
    for number in range(1, times + 1):
        assert re.search(
            rf"rank [01] was ended by SIGKILL; .* again \({number} of {times}\)", output
        )
    metrics = faulty.workspace.metrics()
    document["train"] = LONG | {"steps": metrics[-1]["step"]}
    expected = faulty.train(document | {"checkpoint": {}}, 2, directory="undisturbed")
    assert [m["loss"] for m in metrics] == [m["loss"] for m in expected]


def killed(faulty, **changes):
    """Six steps that are killed once after the third, and not saved before their end."""
    fault = {"name": "faults", "step": 3, "once": True}
    document = faulty.job("none", hooks=["jsonl", fault], launcher=ONE, checkpoint={})
    return document | changes


def test_a_restart_before_the_first_save_begins_where_the_run_was_told_to(faulty):
    document = killed(faulty, scheduler="constant")
    command = faulty.start(document, 1)
    code, output = command.wait()
    assert code == 0, output
    assert output.count("no checkpoint in run: starting anew") == 1
    (faulty.workspace.path / "done").unlink()
    document["train"] |= {"steps": 9}
    document["hooks"][1]["step"] = 8
    document["checkpoint"] = {"resume": str(faulty.workspace.checkpoints()[-1])}
    code, output = faulty.start(document, 1, directory="other").wait()
    assert code == 0, output
    assert output.count("going on from") == 2
    assert [m["step"] for m in faulty.workspace.metrics("other")] == [7, 8, 9]


def test_a_mistake_is_not_tried_again(faulty):
    fault = {"name": "faults", "step": 3, "rank": 1, "what": "mistake"}
    document = faulty.job(hooks=["jsonl", fault], launcher=TWO, checkpoint={})
    code, output = faulty.start(document, 2).wait()
    assert code == 2, output
    assert output.count("a mistake that this hook found") == 1
    assert "starting anew" not in output


def test_sys_exit_in_a_hook_ends_the_run_as_an_error(faulty):
    fault = {"name": "faults", "step": 3, "rank": 1, "what": "exit"}
    code, output = faulty.start(faulty.job(hooks=["jsonl", fault]), 2).wait(30)
    assert code == 1, output
    assert "error: rank 1: something called sys.exit(0)" in output


def test_the_code_is_that_of_the_signal_and_not_of_who_lost_contact(faulty):
    command = faulty.start(faulty.job(train=LONG, checkpoint={}), 2)
    assert faulty.reaches(2), command.output
    survivor, killed = command.workers()
    os.kill(command.pid, signal.SIGSTOP)  # it sees both at once
    os.kill(killed, signal.SIGKILL)
    stat = Path(f"/proc/{survivor}/stat")
    assert faulty.soon(lambda: ") Z " in stat.read_text()), command.output
    os.kill(command.pid, signal.SIGCONT)
    code, output = command.wait()
    assert code == 128 + signal.SIGKILL, output
    assert "lost contact" in output


def test_a_process_of_the_launchers_that_is_no_worker_does_not_count(faulty):
    nothing = {"name": "faults", "step": 0}
    document = faulty.job("none", hooks=["jsonl", nothing], launcher=ONE | {"max_restarts": 0})
    document["train"] |= {"steps": 60}
    command = faulty.start(document | {"checkpoint": {}}, 1, BYSTANDER="1")
    code, output = command.wait()
    assert code == 0, output

"""A run that the scheduler stops saves, and says by its exit code that it is to go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

LONG = {"steps": 100_000, "global_batch_size": 6, "micro_batch_size": 1}
TORCHRUN = {"name": "torchrun", "processes_per_host": 2, "max_restarts": 2}


def preempted(faulty, document, ranks, signalled="the command"):
    """A long run that gets SIGTERM: the number of its steps, which are all saved."""
    command = faulty.start(document | {"train": LONG, "checkpoint": {}}, ranks)
    assert faulty.reaches(3), command.output
    if signalled == "every process":
        os.killpg(command.pid, signal.SIGTERM)
    else:
        os.kill(command.pid if signalled == "the command" else command.workers()[1], signal.SIGTERM)
    code, output = command.wait()
    assert code == 75, output
    assert output.count("Go on with --resume") == 1
    assert "Traceback" not in output
    (saved,) = faulty.workspace.checkpoints()
    done = faulty.workspace.metrics()[-1]["step"]
    assert saved.name == f"step-{done:08d}"
    return done


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_preempted_run_goes_on_as_if_nothing_had_been(faulty, ranks):
    strategy, launcher = ("fsdp2", TORCHRUN) if ranks > 1 else ("none", "local")
    document = faulty.job(strategy, launcher=launcher, scheduler="constant")
    done = preempted(faulty, document, ranks)
    document["train"] = LONG | {"steps": done + 2}
    resumed = faulty.train(document, ranks, "--resume")
    expected = faulty.train(document, ranks, directory="undisturbed")
    assert [m["loss"] for m in resumed] == [m["loss"] for m in expected]


@pytest.mark.parametrize(
    ("start_method", "signalled"),
    [("fork", "every process"), ("fork", "one worker"), ("spawn", "the command")],
)
def test_a_preempted_run_saves_and_is_not_started_again(faulty, start_method, signalled):
    launcher = TORCHRUN | {"start_method": start_method}
    preempted(faulty, faulty.job(launcher=launcher), 2, signalled)


def test_a_run_that_could_not_save_does_not_say_resume_me(faulty):
    fault = {"name": "faults", "step": 2, "rank": 1, "what": "full disk"}
    preempted = {"name": "faults", "step": 3, "rank": 0, "what": "preempt"}
    document = faulty.job("fsdp2", hooks=["jsonl", fault, preempted], launcher=TORCHRUN)
    code, output = faulty.start(document | {"checkpoint": {}}, 2).wait()
    assert code == 1, output
    assert "No space left on device" in output
    assert faulty.workspace.checkpoints() == []


def test_a_run_that_does_not_save_in_time_is_killed(faulty):
    sleeps = {"name": "faults", "step": 3, "rank": 1, "what": "sleep"}
    launcher = TORCHRUN | {"shutdown_seconds": 1}
    document = faulty.job(hooks=["jsonl", sleeps], launcher=launcher, checkpoint={})
    command = faulty.start(document, 2)
    assert faulty.reaches(2), command.output
    os.kill(command.pid, signal.SIGTERM)
    code, output = command.wait(20)
    assert code == 128 + signal.SIGKILL, output
    assert faulty.workspace.checkpoints() == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_before_the_first_step_sigterm_just_ends_the_run(faulty, ranks):
    launcher = TORCHRUN if ranks > 1 else "local"
    document = faulty.job("ddp", kernels=["preempted"], launcher=launcher)
    code, output = faulty.start(document, ranks).wait()
    assert code == 128 + signal.SIGTERM, output
    assert "Traceback" not in output
    assert faulty.workspace.checkpoints() == []


def test_sigterm_ends_a_process_that_is_just_being_forked(faulty):
    nothing = {"name": "faults", "step": 0}
    launcher = TORCHRUN | {"processes_per_host": 1}
    document = faulty.job("none", hooks=["jsonl", nothing], launcher=launcher)
    code, output = faulty.start(document, 1, PREEMPT_FORKED="1").wait()
    assert code == 128 + signal.SIGTERM, output
    assert faulty.workspace.metrics() == []


LATE = """
import os, signal, time
from core_plugin.builtin.launcher import Torchrun, TorchrunParams
from core_plugin.training.stop import restore_default_handlers

def worker():
    restore_default_handlers()
    if os.environ["RANK"] == "1":
        time.sleep(1)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(100)
    return 0

print(Torchrun.launch(TorchrunParams(processes_per_host=2), worker))
"""


def test_a_rank_that_has_finished_is_not_waited_for_when_sigterm_ends_another():
    ended = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == f"{128 + signal.SIGTERM}\n"

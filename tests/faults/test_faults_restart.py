"""Workers that die are replaced, and the run goes on as if they had not."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

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
    metrics = faulty.workspace.metrics()
    document["train"] = LONG | {"steps": metrics[-1]["step"]}
    expected = faulty.train(document | {"checkpoint": {}}, 2, directory="undisturbed")
    assert [m["loss"] for m in metrics] == [m["loss"] for m in expected]

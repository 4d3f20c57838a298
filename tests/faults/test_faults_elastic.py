"""Under torch's own agents: hosts come and go, and a signal saves."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LONG_ENOUGH = 240
"""Seconds for processes that import everything themselves."""
LONG = {"steps": 100_000, "global_batch_size": 6, "micro_batch_size": 1}
KEEP_ALIVE = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


class Agents:
    """``torchrun`` for one and the same run; each stands for a host."""

    def __init__(self, workspace, document, lose) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._workspace = workspace
        self._lose = lose
        self._file = workspace.write(document, 1, "run")
        self._started = []

    def start(self, nodes: str, processes: int) -> subprocess.Popen[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes]
        torchrun += ["--nproc-per-node", str(processes), "--max-restarts", "10"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}"]
        torchrun += ["--rdzv-conf", KEEP_ALIVE, "--local-addr", "127.0.0.1"]
        with (self._workspace.path / f"agent-{len(self._started)}").open("w") as output:
            agent = subprocess.Popen(
                [*torchrun, "-m", "core_plugin", "train", str(self._file), "--resume"],
                cwd=self._workspace.path,
                env=self._workspace.environment | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(agent)
        return agent

    def end(self) -> None:
        for agent in self._started:
            self._lose(agent.pid)
            agent.wait()

    def output(self) -> str:
        files = sorted(self._workspace.path.glob("agent-*"))
        return "\n".join(f"{f.name}:\n{f.read_text()}" for f in files)


@pytest.fixture
def agents(workspace, faulty):
    document = faulty.job("ddp", scheduler="constant", train=LONG, launcher="local")
    agents = Agents(workspace, document | {"checkpoint": {"every": 10}}, faulty.lose)
    yield agents
    agents.end()


def ranks(faulty) -> int:
    """On how many ranks the newest checkpoint was written."""
    saved = faulty.workspace.checkpoints()
    return len(list(saved[-1].glob("rank-*.pt"))) if saved else 0


def assert_same_losses(faulty):
    metrics = faulty.workspace.metrics()
    steps = LONG | {"steps": metrics[-1]["step"]}
    document = faulty.job("none", scheduler="constant", train=steps, checkpoint={})
    expected = faulty.train(document, directory="undisturbed")
    assert [m["step"] for m in metrics] == [m["step"] for m in expected]
    # Sums of three ranks are rounded otherwise, and hundreds of steps make more of that.
    assert [m["loss"] for m in metrics] == pytest.approx([m["loss"] for m in expected], rel=2e-4)


def test_a_host_that_joins_and_one_that_is_lost_change_no_loss(faulty, agents):
    first, second = agents.start("2:3", 1), agents.start("2:3", 1)
    assert faulty.soon(lambda: ranks(faulty) == 2, LONG_ENOUGH), agents.output()
    third = agents.start("2:3", 1)
    assert faulty.soon(lambda: ranks(faulty) == 3, LONG_ENOUGH), agents.output()
    faulty.lose(third.pid)
    assert faulty.soon(lambda: ranks(faulty) == 2, LONG_ENOUGH), agents.output()
    for agent in (first, second):
        agent.send_signal(signal.SIGTERM)
    for agent in (first, second):
        agent.wait(LONG_ENOUGH)
    assert "Go on with --resume" in agents.output()
    assert_same_losses(faulty)


def test_sigterm_to_torchrun_saves_but_its_code_is_its_own(faulty, agents):
    agent = agents.start("1", 2)
    assert faulty.soon(lambda: len(faulty.workspace.metrics()) > 2, LONG_ENOUGH), agents.output()
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(LONG_ENOUGH) == 1
    assert "Go on with --resume" in agents.output()
    assert_same_losses(faulty)

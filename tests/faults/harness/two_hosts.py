"""Two hosts on one machine: network namespaces with a cable between them, and an agent on each."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

CABLE = "cable"
PORT = 29500
SETTINGS = "join_timeout=120,read_timeout=120"
"""How long an agent waits for the other one, and for an answer of the store: at least as long as
the cable may be cut, if the agents are to go on by themselves."""
RETRIES = 6
"""How often TCP then sends again what nobody acknowledges, which takes 25 s."""


class Host(NamedTuple):
    """A network namespace."""

    name: str
    address: str

    def ip(self, *arguments: str) -> None:
        _run("ip", "-n", self.name, *arguments)


class Hosts:
    """Two hosts that share a disk and see each other.

    Args:
        workspace: The disk.
        plugins: A directory with more distributions.
    """

    def __init__(self, workspace: Any, plugins: Path) -> None:
        self.first, self.second = (Host(f"cp-{os.getpid()}-{n}", f"10.93.0.{n}") for n in (1, 2))
        path = os.pathsep.join([workspace.environment["PYTHONPATH"], str(plugins)])
        self.environment = workspace.environment | {"PYTHONPATH": path}
        self._directory = workspace.path
        self._agents: list[Agent] = []

    def __iter__(self) -> Iterator[Host]:
        return iter((self.first, self.second))

    def build(self) -> None:
        for host in self:
            _run("ip", "netns", "add", host.name)
            host.ip("link", "set", "lo", "up")
        end, other_end = ((CABLE, "netns", host.name) for host in self)
        _run("ip", "link", "add", *end, "type", "veth", "peer", *other_end)
        for host in self:
            host.ip("address", "add", f"{host.address}/24", "dev", CABLE)
            host.ip("link", "set", CABLE, "up")

    def remove(self) -> None:
        for agent in self._agents:
            agent.kill()
        for host in self:
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)

    def cut(self) -> None:
        """Pull the cable out of the second host."""
        self.second.ip("link", "set", CABLE, "down")

    def mend(self) -> None:
        self.second.ip("link", "set", CABLE, "up")

    def give_up_soon(self) -> None:
        """Let TCP take a cable for cut early.

        Linux's 15 retries take a quarter of an hour. An agent waits as long for its store, and then
        ends; when the cable is mended before, it goes on.
        """
        for host in self:
            retries = f"net.ipv4.tcp_retries2={RETRIES}"
            _run("ip", "netns", "exec", host.name, "sysctl", "-w", retries)

    def start(self, file: Path, *options: str, max_restarts: int) -> list[Agent]:
        """The same command on both, under torchrun; the first keeps the store."""
        return [self._start(h, file, *options, max_restarts=max_restarts) for h in self]

    def _start(self, host: Host, file: Path, *options: str, max_restarts: int) -> Agent:
        torchrun = [
            "--nnodes=2",
            "--nproc-per-node=1",
            f"--max-restarts={max_restarts}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.first.address}:{PORT}",
            f"--rdzv-conf=is_host={host is self.first},{SETTINGS}",
            f"--local-addr={host.address}",
        ]
        python = [sys.executable, "-m", "torch.distributed.run", *torchrun]
        command = [*python, "-m", "core_plugin", "train", str(file), *options]
        output = self._directory / f"agent-{len(self._agents)}"
        with output.open("wb") as opened:
            process = subprocess.Popen(
                ["ip", "netns", "exec", host.name, *command],
                cwd=self._directory,
                env=self.environment | {"GLOO_SOCKET_IFNAME": CABLE},
                stdout=opened,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._agents.append(Agent(process, output))
        return self._agents[-1]


class Agent:
    """torchrun on one host."""

    def __init__(self, process: subprocess.Popen[bytes], file: Path) -> None:
        self._process = process
        self._file = file

    @property
    def output(self) -> str:
        return self._file.read_text()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def end(self) -> tuple[int, str]:
        """The exit code, and all that was printed."""
        return self._process.wait(), self.output

    def kill(self) -> None:
        """End it with its workers, of which each leads a session of its own."""
        tree = _tree(self._process.pid)
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def _tree(pid: int) -> list[int]:
    """A process and those below it."""
    with contextlib.suppress(FileNotFoundError):
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *(q for child in below for q in _tree(int(child)))]
    return []


def _run(*command: str) -> None:
    """Run a command that needs root; without it the test fails, and says so."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        fault = done.stderr.strip() if done.returncode else None
    except FileNotFoundError:
        fault = "there is no such command"
    if fault:
        pytest.fail(
            f"two hosts are network namespaces, which need root, and ip (iproute2): "
            f"{' '.join(command)}: {fault}",
            pytrace=False,
        )

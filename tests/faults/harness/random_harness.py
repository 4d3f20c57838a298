"""Runs that are interrupted at random moments, and compared with undisturbed ones.

What a seed draws is a :class:`Plan`: a job, and how each of its first attempts is interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from core_plugin.training import saved

PLUGINS = Path(__file__).parent
TRAINED = (("adamw", False), ("muon", False), ("adamw", True))
"""The optimizer, and whether an adapter is trained; of one, Muon has nothing to train."""
JOBS = [(s, *trained) for s, trained in itertools.product(("ddp", "fsdp2"), TRAINED)]
"""Strategy, optimizer, and whether an adapter is trained: what the numbers depend on."""
STEPS = 8
TIMED = ("tokens_per_second", "seconds")
"""The metrics that no two runs have equal."""
FILES = 14
"""More than are in a checkpoint."""
HANG_TIMEOUT = 1.0
SURVIVAL = 10.0
"""Seconds after which nothing of an ended run may be left."""
DISK = 32 * 2**20

WAYS = {
    "kill one rank": 25,
    "kill all": 20,
    "terminate": 20,
    "fill the disk": 12,
    "raise in data": 12,
    "sleep in data": 8,
    "stop a rank": 3,
}
"""What is done to a run, and how often."""
CODES = {
    "kill one rank": {137, 1},  # the other one may tell first that it lost contact
    "kill all": {137},
    "terminate": {75, 143},
    "fill the disk": {1},
    "raise in data": {1},
    "sleep in data": {1},
    "stop a rank": {1},
}
"""How the command may end then, if it does not end before."""
MESSAGES = {
    "fill the disk": ("No space left on device", "File too large"),
    "raise in data": ("the sample cannot be read",),
    "sleep in data": ("the others probably wait for rank",),
    "stop a rank": ("the others probably wait for rank",),
}
"""What it says of the cause, one of these, if it ends with code 1."""


@dataclasses.dataclass(frozen=True)
class Interruption:
    """What is done to an attempt, and when: so many seconds after it has come somewhere.

    Attributes:
        way: One of :data:`WAYS`.
        rank: Whom it hits.
        place: ``start``, ``step`` or ``save``.
        share: Which of the steps or saves that are left: 0 the first, below 1 the last. How much of
            the time to the first step, for ``start``.
        files: Of how many files of the save; it is enough that the save is complete.
        seconds: How long after the step or the file.
        room: Bytes that a full disk has left.
        restarts: How often the launcher may start the ranks again by itself.
    """

    way: str
    rank: int
    place: str
    share: float
    files: int
    seconds: float
    room: int
    restarts: int

    @classmethod
    def drawn(cls, draw: random.Random) -> Interruption:
        (way,) = draw.choices(list(WAYS), list(WAYS.values()))
        places = ("step", "save") if way == "stop a rank" else ("start", "step", "save", "save")
        return cls(
            way=way,
            rank=draw.randrange(2),
            place=draw.choice(places),
            share=draw.random(),
            files=draw.randrange(FILES),
            seconds=math.exp(draw.uniform(math.log(0.0005), math.log(0.1))),
            room=draw.randrange(300_000),
            restarts=draw.randrange(2) if way == "kill one rank" else 0,
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What happens to the run of a seed."""

    job: int
    every: int
    keep: int
    asynchronous: bool
    interruptions: tuple[Interruption, ...]

    @classmethod
    def drawn(cls, seed: int) -> Plan:
        draw = random.Random(seed)
        (times,) = draw.choices((1, 2, 3), (6, 3, 1))
        return cls(
            job=seed % len(JOBS),
            every=draw.choice((1, 2, 3, 4)),
            keep=draw.choice((1, 2, 3)),
            asynchronous=draw.random() < 0.5,
            interruptions=tuple(Interruption.drawn(draw) for _ in range(times)),
        )

    def __str__(self) -> str:
        strategy, optimizer, adapter = JOBS[self.job]
        lines = (
            f"{strategy}, {optimizer}, {'an adapter' if adapter else 'no adapter'}, a save every "
            f"{self.every} steps{', asynchronous' * self.asynchronous}, {self.keep} kept",
            *map(str, self.interruptions),
        )
        return "\n  ".join(lines)


@dataclasses.dataclass(frozen=True)
class Reference:
    """The undisturbed run of a job: each step's metrics and tensors, and its time to the first."""

    metrics: Mapping[int, Mapping[str, float]]
    tensors: Mapping[int, Mapping[str, torch.Tensor]]
    first_step: float


def document(faulty: Any, job: int, checkpoint: Mapping[str, Any], restarts: int = 0) -> Any:
    strategy, optimizer, adapter = JOBS[job]
    data = faulty.workspace.small()["data"] | {"name": "brittle"}
    peft = {"name": "lora", "r": 2, "lora_dropout": 0.2} if adapter else None
    return faulty.job(
        strategy,
        data=data,
        optimizer={"name": optimizer, "lr": 1e-2},
        peft=peft,
        train={
            "steps": STEPS,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "hang_timeout": None,
        },
        checkpoint=dict(checkpoint),
        launcher={"name": "torchrun", "processes_per_host": 2, "max_restarts": restarts},
    )


def start(faulty: Any, run: Any, directory: str, *options: str) -> Any:
    path = os.pathsep.join([faulty.workspace.environment["PYTHONPATH"], str(PLUGINS)])
    return faulty.start(run, 2, *options, directory=directory, PYTHONPATH=path)


@functools.cache
def _references() -> dict[int, Reference]:
    return {}


def reference(faulty: Any, job: int) -> Reference:
    """The undisturbed run, which is made once in a process, with a checkpoint of every step."""
    if job not in _references():
        run = document(faulty, job, {"every": 1, "keep": STEPS})
        began = time.monotonic()
        command = start(faulty, run, "reference")
        assert faulty.reaches(1, "reference"), command.output
        first_step = time.monotonic() - began
        code, output = command.wait()
        assert code == 0, output
        directory = faulty.workspace.path / "reference"
        found = saved.steps(directory / "checkpoints")
        assert list(found) == list(range(1, STEPS + 1))
        tensors_of = {step: tensors(path) for step, path in found.items()}
        _references()[job] = Reference(metrics(directory), tensors_of, first_step)
    return _references()[job]


def metrics(directory: Path) -> dict[int, Mapping[str, float]]:
    """The last metrics of each step that are comparable."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {m["step"]: {k: v for k, v in m.items() if k not in TIMED} for m in lines}


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, whole, read without core-plugin."""
    path = checkpoint / "state"
    kinds = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    found = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in kinds.items()}
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        dcp.load(found, checkpoint_id=path, no_dist=True)
    return found


# One run


class RandomRun:
    """The run of a plan, in a directory ``run`` of its own."""

    def __init__(self, faulty: Any, plan: Plan, disk: Disk) -> None:
        self._faulty, self._plan, self._disk = faulty, plan, disk
        self._reference = reference(faulty, plan.job)
        self._directory = faulty.workspace.path / "run"
        self._fault = faulty.workspace.path / "fault"
        self._command: Any = None
        self.ends: list[str] = []
        """How each attempt ended."""

    def complete(self) -> None:
        """Interrupt the run as planned, and let it go on to its end."""
        for interruption in self._plan.interruptions:
            newest = self._newest()
            self._start(interruption)
            self._interrupt(interruption, newest)
            code, output = self._end(interruption, newest)
            self.ends.append(f"{interruption.way} at {interruption.place}: {code}")
            if code == 0:
                break
            self._check_code(interruption, code, output)
        else:
            newest = self._newest()
            self._start(None)
            code, output = self._end(None, newest)
            assert code == 0, output
        self._check_result()

    def _start(self, interruption: Interruption | None) -> None:
        plan = self._plan
        checkpoint = {"every": plan.every, "keep": plan.keep, "asynchronous": plan.asynchronous}
        restarts = interruption.restarts if interruption else 0
        options = ["--resume"]
        if interruption and interruption.way in ("sleep in data", "stop a rank"):
            options.append(f"train.hang_timeout={HANG_TIMEOUT}")
        run = document(self._faulty, plan.job, checkpoint, restarts)
        self._command = start(self._faulty, run, "run", *options)

    # The moment

    def _interrupt(self, interruption: Interruption, newest: int) -> None:
        if interruption.place == "start":
            self._wait(lambda: False, interruption.share * self._reference.first_step)
        else:
            wait_for = self._step_is_logged if interruption.place == "step" else self._save_comes_to
            self._wait(wait_for(interruption, newest), 60)
            self._wait(lambda: False, interruption.seconds)
        self._act(interruption)

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for a condition, while the command runs."""
        deadline = time.monotonic() + seconds
        while not condition() and self._runs() and time.monotonic() < deadline:
            time.sleep(min(0.001, max(0, deadline - time.monotonic())))

    def _runs(self) -> bool:
        return Path(f"/proc/{self._command.pid}").exists()

    def _step_is_logged(self, interruption: Interruption, newest: int) -> Callable[[], bool]:
        step = newest + 1 + int(interruption.share * (STEPS - newest))
        file = self._directory / "metrics.jsonl"
        old = file.stat().st_mtime_ns if file.exists() else 0
        line = f'"step": {step},'.encode()

        def is_logged() -> bool:
            with contextlib.suppress(FileNotFoundError):
                return file.stat().st_mtime_ns != old and line in file.read_bytes()
            return False

        return is_logged

    def _save_comes_to(self, interruption: Interruption, newest: int) -> Callable[[], bool]:
        left = [s for s in range(newest + 1, STEPS + 1) if s % self._plan.every == 0 or s == STEPS]
        step = left[int(interruption.share * len(left))] if left else STEPS
        final = self._directory / "checkpoints" / f"step-{step:08d}"
        partial = final.with_name(f".partial-{final.name}")
        old = _stamp(partial)  # an interrupted attempt may have left it

        def comes_to() -> bool:
            with contextlib.suppress(FileNotFoundError):
                if _stamp(partial) != old and len(saved.files(partial)) >= interruption.files:
                    return True
            return final.exists()

        return comes_to

    # What is done

    def _act(self, interruption: Interruption) -> None:
        way, rank = interruption.way, interruption.rank
        if way == "fill the disk":
            self._disk.fill(interruption.room, self._command.workers())
        elif way in ("raise in data", "sleep in data"):
            aside = self._fault.with_suffix(".new")
            aside.write_text(f"{way.split()[0]} {rank}")
            aside.rename(self._fault)
        elif way == "kill all":
            _send(os.killpg, self._command.pid, signal.SIGKILL)
        elif way == "terminate":
            _send(os.kill, self._command.pid, signal.SIGTERM)
        else:
            workers = self._command.workers()
            hit = workers[rank] if len(workers) == 2 else self._command.pid
            _send(os.kill, hit, signal.SIGKILL if way == "kill one rank" else signal.SIGSTOP)
            if way == "stop a rank":
                self._wait(self._is_complete, 60)
                _send(os.kill, hit, signal.SIGCONT)  # it came too late to keep the run from ending

    def _is_complete(self) -> bool:
        return (self._directory / "checkpoints" / f"step-{STEPS:08d}").exists()

    # What must be true then

    def _end(self, interruption: Interruption | None, newest: int) -> tuple[int, str]:
        """Wait for the end of an attempt: where it began, and what it left, must be right."""
        code, output = self._command.wait(120)
        deadline = time.monotonic() + SURVIVAL
        while survivors := _session(self._command.pid):
            assert time.monotonic() < deadline, f"{survivors} outlive the command:\n{output}"
            time.sleep(0.01)
        self._disk.free()
        self._fault.unlink(missing_ok=True)
        begins = [line for line in output.splitlines() if _tells_the_start(line)]
        assert begins or (interruption and code), output
        if begins:
            path = Path("run", "checkpoints", f"step-{newest:08d}")
            wanted = f"going on from {path}" if newest else "no checkpoint in run: starting anew"
            assert begins[0] == wanted, output
        self._check_checkpoints(output)
        return code, output

    def _check_checkpoints(self, output: str) -> None:
        """What is there under the name of a checkpoint is whole, and right."""
        for step, path in saved.steps(self._directory / "checkpoints").items():
            assert saved.verify(path) == [], f"{path.name}\n{output}"
            wrong = _different(tensors(path), self._reference.tensors[step])
            assert not wrong, f"{path.name} has other values than the undisturbed run: {wrong}"

    def _check_code(self, interruption: Interruption, code: int, output: str) -> None:
        assert code in CODES[interruption.way], f"it ended with {code}:\n{output}"
        if code == 1:
            known = MESSAGES.get(interruption.way, ("lost contact",))
            assert any(message in output for message in known), output
        if code == 75:
            assert self._newest() == max(metrics(self._directory)), output
            assert output.count("Go on with --resume") == 1, output

    def _check_result(self) -> None:
        assert self._newest() == STEPS
        assert metrics(self._directory) == self._reference.metrics
        left = saved.left_over(self._directory / "checkpoints")
        assert left == [], "the last save removes what interrupted ones left"

    def _newest(self) -> int:
        return max(saved.steps(self._directory / "checkpoints"), default=0)


def _tells_the_start(line: str) -> bool:
    return line.startswith("going on from ") or line.endswith(": starting anew")


def _stamp(directory: Path) -> tuple[int, int] | None:
    with contextlib.suppress(FileNotFoundError):
        stat = directory.stat()
        return stat.st_ino, stat.st_ctime_ns
    return None


def _send(kill: Callable[[int, int], None], target: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        kill(target, number)


def _session(leader: int) -> list[int]:
    """The processes of a session that are not dead yet."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            if session == str(leader) and state != "Z":
                found.append(int(process.name))
    return found


def _different(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of the tensors that are not equal bit for bit."""
    names = sorted(one.keys() | other.keys())
    return [n for n in names if n not in one or n not in other or not one[n].equal(other[n])]


# The disk


class Disk:
    """A small file system for the run, if this user may mount one; else a limit on its files."""

    def __init__(self, place: Path, is_mounted: bool) -> None:
        self._filler = place / "filler"
        self._place, self._is_mounted = place, is_mounted

    def fill(self, room: int, workers: list[int]) -> None:
        """Leave so many bytes."""
        if self._is_mounted:
            stat = os.statvfs(self._place)
            with self._filler.open("wb") as file, contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, max(1, stat.f_bavail * stat.f_frsize - room))
            return
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(worker, resource.RLIMIT_FSIZE, (room // 4, room // 4))

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)


@contextlib.contextmanager
def disk(place: Path) -> Iterator[Disk]:
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(place)]
    can_mount = os.geteuid() == 0 and shutil.which("mount") is not None
    is_mounted = can_mount and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield Disk(place, is_mounted)
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)

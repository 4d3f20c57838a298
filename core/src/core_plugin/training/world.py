"""The ranks of a run: who they are, and how they agree before and outside of training."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.rendezvous import rendezvous

from core_plugin.errors import ConfigError, CorePluginError, RankMismatchError, TrainingError
from core_plugin.training import blame

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others to come, and to say that they run the same thing."""
NEVER = timedelta(days=365)
"""Exchanges do not end by themselves: the watchdog ends ranks that wait in vain, and says why."""


@dataclass(frozen=True)
class Place:
    """A process's place among those of the run."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


def place_from_environment(environment: Mapping[str, str] | None = None) -> Place | None:
    """The place that a launcher gave this process; None if none did.

    torchrun's variables count first, then those of a SLURM step of more than one task.

    Raises:
        ConfigError: The variables contradict each other.
    """
    environment = os.environ if environment is None else environment
    names = [n for n in ("RANK", "WORLD_SIZE") if n in environment]
    if names:
        place = _torchrun_place(environment)
    elif "SLURM_PROCID" in environment and _slurm_tasks(environment) > 1:
        place = _slurm_place(environment)
    else:
        return None
    if not (0 <= place.rank < place.world_size and 0 <= place.local_rank < place.local_world_size):
        raise ConfigError(f"the environment's variables contradict each other: {place}")
    return place


def _torchrun_place(environment: Mapping[str, str]) -> Place:
    missing = [
        n
        for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if n not in environment
    ]
    if missing:
        raise ConfigError(
            f"the environment has RANK or WORLD_SIZE but not {', '.join(missing)}; "
            "start the run with torchrun, or unset them all"
        )
    return Place(
        _number(environment, "RANK"),
        _number(environment, "LOCAL_RANK"),
        _number(environment, "WORLD_SIZE"),
        _number(environment, "LOCAL_WORLD_SIZE", environment["WORLD_SIZE"]),
    )


def _slurm_tasks(environment: Mapping[str, str]) -> int:
    of_step = "SLURM_STEP_NUM_TASKS"
    return _number(environment, of_step if of_step in environment else "SLURM_NTASKS", "1")


def _slurm_place(environment: Mapping[str, str]) -> Place:
    size = _slurm_tasks(environment)
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", str(size))
    return Place(
        _number(environment, "SLURM_PROCID"),
        _number(environment, "SLURM_LOCALID"),
        size,
        # "2(x3),4" is three nodes with two tasks each, and one with four.
        max(map(int, re.findall(r"(\d+)(?:\(x\d+\))?", tasks))),
    )


def rendezvous_variables(place: Place, environment: Mapping[str, str]) -> dict[str, str]:
    """What torch's rendezvous reads: as it stands in the environment, or from SLURM's variables.

    All tasks of a SLURM step meet at the node that launched it, at a port that the job's number
    gives.
    """
    variables = {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": environment.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"),
        "MASTER_PORT": str(20000 + _number(environment, "SLURM_JOB_ID", "0") % 20000),
    }
    return {name: environment.get(name, value) for name, value in variables.items()}


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigError(f"the environment's {name} is no number: {text!r}") from None


class Progress:
    """What the main thread is doing. To tell it costs next to nothing: no lock, nothing written."""

    def __init__(self) -> None:
        self.beats = 0
        self.phase = "starting"
        self.step = 0

    def enter(self, phase: str) -> None:
        """Begin something; it may take ``train.hang_timeout``."""
        self.phase = phase
        self.beats += 1


class World:
    """The ranks of a run, joined: a process group for the work and one for agreements.

    The second one is of the gloo backend, so that agreements neither wait for the device nor mix
    with what is under way on the first.
    """

    def __init__(self, place: Place, store: dist.Store) -> None:
        self.place = place
        self.store = store
        self.control: dist.ProcessGroup | None = None
        self.progress = Progress()

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.place.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.place.world_size

    @contextmanager
    def agreement(self, identity: Mapping[str, str]) -> Iterator[None]:
        """A block at whose end all ranks have the same identity, and none has failed in it.

        It goes through the store alone: no process group exists yet.

        Raises:
            RankMismatchError: On every rank, with a table of what differs, or with the failures
                of the others.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        report = {"identity": dict(identity), "failure": error and blame.told(error)}
        self.store.set(f"report/{self.rank}", json.dumps(report))
        if self.rank == 0:
            reports = [json.loads(self.store.get(f"report/{r}")) for r in range(self.size)]
            self.store.set("verdict", _verdict(reports))
        verdict = self.store.get("verdict").decode()
        self.leave_together("verdict/seen")
        if error or verdict:
            raise error or RankMismatchError(verdict)

    def leave_together(self, key: str) -> None:
        """Let rank 0, which may keep the store, go on last."""
        if self.store.add(key, 1) == self.size:
            self.store.set(f"{key}/all", "")
        if self.rank == 0:
            self.store.wait([f"{key}/all"], timedelta(seconds=30))

    def first_to_say(self, what: str) -> bool:
        """Whether no other rank has asked for the same thing before; for error messages."""
        try:
            return self.store.add(f"said/{what}", 1) == 1
        except RuntimeError:
            return True

    def start(self, backend: str) -> None:
        """Create the two process groups."""
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("work", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=NEVER,
        )
        self.control = dist.new_group(backend="gloo", timeout=NEVER)

    def separate(self) -> World:
        """The same ranks with a group of their own for agreements, for another thread. Collective.

        Exchanges of two threads over one group would be taken for each other.
        """
        world = World(self.place, self.store)
        world.control = dist.new_group(backend="gloo", timeout=NEVER)
        return world

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank. Collective."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def sum_later(self, *numbers: int) -> Callable[[], list[int]]:
        """Begin to add up numbers over the ranks. What is returned waits for the sums. Collective.

        The numbers are exact up to 2**63.
        """
        sums = torch.tensor(numbers, dtype=torch.int64)
        adding = dist.all_reduce(sums, group=self.control, async_op=True) if self.size > 1 else None

        def wait() -> list[int]:
            if adding is not None:
                adding.wait()
            return sums.tolist()

        return wait

    def from_first(self, value: T | None) -> T:
        """Rank 0's value, on every rank. Collective."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]  # type: ignore[return-value]

    @contextmanager
    def together(
        self, what: str, error_type: type[CorePluginError], *, collective: bool = False
    ) -> Iterator[None]:
        """A block that either no rank fails in or all do. Collective at its end.

        Args:
            what: What the block does, for the message.
            error_type: What is raised for an error that is not the user's.
            collective: The block itself exchanges something. A rank that fails in it cannot wait
                for the others, who may wait for it: it ends at once, and they lose contact.
        """
        self.progress.enter(what)
        error: BaseException | None = None
        try:
            yield
        except (Exception, CheckpointException) as caught:
            error = caught
        failure = error
        if error and not isinstance(error, CorePluginError):
            failure = blame.BugError.of(error)
        if error and collective:
            if error is failure or lost_contact(error):
                raise error
            raise error_type(f"{what} failed on rank {self.rank}: {blame.told(error)}") from failure
        failures = {rank: found for rank, found in enumerate(self.gather(failure)) if found}
        if not failures:
            return
        first = next(iter(failures.values()))
        if isinstance(first, CorePluginError) and len({str(f) for f in failures.values()}) == 1:
            raise first from error  # all ranks tell it, as the user's own mistake
        rows = [f"rank {rank}: {blame.told(found)}" for rank, found in failures.items()]
        cause = next((f for f in failures.values() if isinstance(f, blame.BugError)), error)
        raise error_type(f"{what} failed on " + "\n".join(rows)) from cause


def lost_contact(error: BaseException) -> bool:
    """Whether the error is that of a collective whose other side is gone."""
    return isinstance(error, RuntimeError) and any(
        sign in str(error) for sign in ("gloo", "NCCL", "Connection")
    )


def _verdict(reports: list[dict[str, Any]]) -> str:
    """What failed on which rank, or a table of what differs among them; empty if all is well."""
    failures = [f"rank {r}: {report['failure']}" for r, report in enumerate(reports)]
    failures = [f for f, report in zip(failures, reports, strict=True) if report["failure"]]
    return "\n".join(failures) or _mismatch([report["identity"] for report in reports])


def _mismatch(identities: list[dict[str, str]]) -> str:
    rows = []
    for key in dict.fromkeys(key for identity in identities for key in identity):
        values = [identity.get(key, "(not there)") for identity in identities]
        if len(set(values)) > 1:
            groups: dict[str, list[str]] = {}
            for rank, value in enumerate(values):
                groups.setdefault(value, []).append(str(rank))
            rows += [f"  {key}: {v} (rank {', '.join(ranks)})" for v, ranks in groups.items()]
    if not rows:
        return ""
    return (
        "the ranks do not run the same thing:\n"
        + "\n".join(rows)
        + "\ninstall the same versions everywhere, and give every rank the same YAML"
    )


def fresh_store(store: dist.Store, place: Place) -> dist.Store:
    """A part of the store that no earlier attempt of the same ranks has written into.

    An elastic agent may keep one store for all attempts (pytorch/pytorch#167288). So rank 0 offers
    a name, each rank accepts with a word of its own, and an offer counts once it has all of these.
    """
    words = [""] * place.world_size
    word = secrets.token_hex(8)
    if place.rank == 0:
        store.set("offer", word)
        words[1:] = [store.get(f"{word}/{r}").decode() for r in range(1, place.world_size)]
        store.set(f"{word}/accepted", json.dumps(words))
        return dist.PrefixStore(word, store)
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while time.monotonic() < deadline:
        offer = store.get("offer").decode()
        store.set(f"{offer}/{place.rank}", word)
        if store.check([f"{offer}/accepted"]):
            words = json.loads(store.get(f"{offer}/accepted"))
            if words[place.rank : place.rank + 1] == [word]:
                return dist.PrefixStore(offer, store)
        time.sleep(0.01)
    raise TrainingError(f"rank {place.rank} waited in vain for rank 0; did every host start?")


@contextmanager
def join(place: Place | None) -> Iterator[World]:
    """The world of this process, until the end of the block.

    Without a place it is a world of one.
    """
    if place is None:
        world = World(Place(), dist.HashStore())
    else:
        os.environ.update(rendezvous_variables(place, os.environ))
        try:
            store, _, _ = next(iter(rendezvous("env://", timeout=TIMEOUT)))
        except dist.DistError as error:
            raise TrainingError(
                f"the ranks cannot meet at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                f" ({str(error).splitlines()[0]}); is the port free, and did every host start?"
            ) from error
        world = World(place, fresh_store(store, place))
    try:
        yield world
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()

"""The strategy that is tested, and what the cases of a process share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from core_plugin.plugin import BasePlugin
from core_plugin.types.distributed import BaseDistributed, Capabilities, DistributedPlugin

if TYPE_CHECKING:
    import torch.distributed as dist

PATIENCE = timedelta(seconds=25)
"""How long a rank waits for the others; less than a case may take, so that it says where."""


@dataclass(frozen=True)
class Subject:
    """A strategy by its plugin's name."""

    plugin_type: ClassVar[type[BasePlugin]] = DistributedPlugin
    levels: ClassVar[tuple[int, ...]] = (1, 2, 3)
    arguments: ClassVar[frozenset[str]] = frozenset(("strategy", "loop", "rank", "directory"))
    hardware: ClassVar[bool] = False
    all_kinds: ClassVar[Mapping[str, str]] = {"several": "strategies for several processes"}
    groups: ClassVar[bool] = True

    name: str
    params: Any
    """An instance of the strategy's ``Params``."""

    @property
    def strategy(self) -> type[BaseDistributed]:
        """The class that the name stands for."""
        strategy: type[BaseDistributed] = DistributedPlugin(self.name).resolve()
        return strategy

    @property
    def kinds(self) -> frozenset[str]:
        """Which of them the strategy is."""
        return frozenset({"several"} if self.strategy.capabilities.multiple_processes else ())

    @staticmethod
    def capability_names() -> frozenset[str]:
        """What ``requires`` in a case can ask for."""
        return frozenset(field.name for field in dataclasses.fields(Capabilities))

    def declares(self, capability: str) -> bool:
        """Whether the strategy declares that it can do it."""
        declared: bool = getattr(self.strategy.capabilities, capability)
        return declared

    @contextmanager
    def session(self, rank: int, size: int, store: Path | None) -> Iterator[DistributedSession]:
        """See :class:`core_plugin.testing.processes.Subject`.

        One rank by itself has a process group, too, as in a run.
        """
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        shared: dist.Store | None = dist.FileStore(str(store), size) if store else None
        if shared is None and size == 1:
            shared = dist.HashStore()
        if shared is not None:
            join(shared, rank, size)
        try:
            yield DistributedSession(self, rank, size)
        finally:
            if shared is not None:
                dist.destroy_process_group()


def join(store: dist.Store, rank: int, size: int) -> None:
    """Make the process group of a case's ranks."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)


class DistributedSession:
    """The arguments that cases can have."""

    def __init__(self, subject: Subject, rank: int, size: int) -> None:
        from core_plugin.testing.distributed.loop import Loop

        self.rank = rank
        self.strategy = subject.strategy
        self.loop = Loop(self.strategy, subject.params, rank, size)

    def argument(self, name: str, directory: Path) -> Any:
        """See :class:`core_plugin.testing.processes.Session`."""
        return directory if name == "directory" else getattr(self, name)

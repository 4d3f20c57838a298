"""The PEFT method that is tested, and what the cases of a process share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from core_plugin.plugin import BasePlugin
from core_plugin.types.peft import BasePeft, PeftPlugin

if TYPE_CHECKING:
    from core_plugin.adapters.layer import AdapterLayer, AdapterModule

LAYER_TYPES = (
    "Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d", "MultiheadAttention", "Parameter",
)  # fmt: skip
"""The names in ``torch.nn`` of the types whose layers are tried."""


def _merges(kind: type[AdapterModule]) -> bool:
    from core_plugin.adapters.layer import AdapterLayer

    return issubclass(kind, AdapterLayer) and kind.merge_into is not AdapterLayer.merge_into


CAPABILITIES: Mapping[str, Callable[[type[AdapterModule]], bool]] = {
    "merging": _merges,
    "per_sample": lambda kind: kind.samples,
}
"""What a class says by what it defines: that it can be merged, or have an adapter a sample."""


@dataclass(frozen=True)
class Subject:
    """A method by its plugin's name."""

    plugin_type: ClassVar[type[BasePlugin]] = PeftPlugin
    levels: ClassVar[tuple[int, ...]] = (1, 2, 3)
    arguments: ClassVar[frozenset[str]] = frozenset(
        ("subject", "method", "models", "rank", "directory")
    )
    hardware: ClassVar[bool] = False
    all_kinds: ClassVar[Mapping[str, str]] = {
        "layers": "methods that change layers",
        "model": "methods that adapt a model at its door",
        **{name: f"methods with a layer for nn.{name}" for name in LAYER_TYPES},
    }
    groups: ClassVar[bool] = True

    name: str
    params: Any
    """An instance of the method's ``Params``."""

    @property
    def method(self) -> type[BasePeft]:
        """The class that the name stands for."""
        method: type[BasePeft] = PeftPlugin(self.name).resolve()
        return method

    @property
    def kinds(self) -> frozenset[str]:
        """Which of them the method is."""
        method = self.method
        kinds = {name for name in LAYER_TYPES if self.layer_class(name) is not None}
        kinds |= {"layers"} if method.layers() else set()
        kinds |= {"model"} if method.model_adapter() is not None else set()
        return frozenset(kinds)

    def layer_class(self, layer_type: str) -> type[AdapterLayer] | None:
        """The method's layer for a type in ``torch.nn``."""
        from torch import nn

        return self.method.layer_class(getattr(nn, layer_type))

    @staticmethod
    def capability_names() -> frozenset[str]:
        """What ``requires`` in a case can ask for."""
        return frozenset(CAPABILITIES)

    def declares(self, capability: str) -> bool:
        """Whether the method can do it; it says so by what its classes define."""
        door = self.method.model_adapter()
        own = [*self.method.layers().values(), *([door] if door else [])]
        return any(map(CAPABILITIES[capability], own))

    @contextmanager
    def session(self, rank: int, size: int, store: Path | None) -> Iterator[PeftSession]:
        """See :class:`core_plugin.testing.processes.Subject`."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if store:
            file = dist.FileStore(str(store), size)
            dist.init_process_group("gloo", store=file, rank=rank, world_size=size)
        try:
            yield PeftSession(self, rank)
        finally:
            if store:
                dist.destroy_process_group()


class PeftSession:
    """The arguments that cases can have."""

    def __init__(self, subject: Subject, rank: int) -> None:
        from core_plugin.testing.peft.models import Models

        self.subject = subject
        self.rank = rank
        self.method = subject.method
        self.models = Models(subject.method, subject.params)

    def argument(self, name: str, directory: Path) -> Any:
        """See :class:`core_plugin.testing.processes.Session`."""
        return directory if name == "directory" else getattr(self, name)

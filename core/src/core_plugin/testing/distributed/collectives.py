"""Counting what ranks exchange.

Two counts, since neither sees all. The operators of ``torch.distributed`` are seen by name when
they are called from this thread, also by the C++ of DistributedDataParallel in a backward pass on
the CPU. The process groups' own counters see every collective of gloo, from any thread, but do not
say which one it was.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"))


class Collectives(TorchDispatchMode):
    """Notes the collectives in a block.

    Args:
        without: A group whose own are not counted.
    """

    def __init__(self, without: dist.ProcessGroup | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._without = without
        self.names: list[str] = []
        self.reduced = 0
        """The elements that went into reductions."""
        self._before = 0

    def __enter__(self) -> Collectives:
        self._before = self._sequence()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.total = self._sequence() - self._before

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note a collective, and do what was to be done."""
        if function.namespace in NAMESPACES:
            self.names.append(function._schema.name.partition("::")[2])
            if self._reduces(self.names[-1]):
                self.reduced += sum(t.numel() for t in tree_leaves(args) if isinstance(t, Tensor))
        return function(*args, **(kwargs or {}))

    @property
    def reductions(self) -> list[str]:
        """Those that add up, or that give each rank something else of every other one."""
        return [name for name in self.names if self._reduces(name)]

    @staticmethod
    def _reduces(name: str) -> bool:
        return any(part in name for part in ("reduce", "alltoall", "all_to_all"))

    def _sequence(self) -> int:
        """How many collectives the groups of this process have begun."""
        groups = dist.distributed_c10d._world.pg_map
        counted = [group for group in groups if group is not self._without]
        return sum(group._get_sequence_number_for_group() for group in counted)  # type: ignore[attr-defined]

"""How much of a model's parameters each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from core_plugin import tensors
from core_plugin.training.world import World

_FEW = 4
"""As many ranks are told of one by one."""


@dataclass(frozen=True)
class Share:
    """What a rank holds."""

    parameters: int
    trained: int
    bytes: int
    """Of the parameters alone."""


def share(model: nn.Module) -> Share:
    """This rank's share of a model that may be sharded."""
    parts = [(tensors.local(p), p.requires_grad) for p in model.parameters()]
    return Share(
        sum(part.numel() for part, _ in parts),
        sum(part.numel() for part, trained in parts if trained),
        sum(part.numel() * part.itemsize for part, _ in parts),
    )


def report(model: nn.Module, world: World) -> str:
    """Every rank's share of the model, for people to read. Collective."""
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shares = world.gather(share(model))
    if len(set(shares)) == 1 or len(shares) > _FEW:
        return f"{_ranks(len(shares))}: {_told(shares, total, trained)}"
    each = (f"rank {r}: {_told([one], total, trained)}" for r, one in enumerate(shares))
    return "; ".join(each)


def size(number: int) -> str:
    """A number of bytes, for people to read: powers of ten, as disks and networks have them."""
    amount, units = float(number), iter(("B", "kB", "MB", "GB"))
    for unit in units:
        if amount < 999.95:
            return f"{amount:.1f} {unit}" if unit != "B" else f"{number} B"
        amount /= 1000
    return f"{amount:.1f} TB"


def _ranks(count: int) -> str:
    return "rank 0" if count == 1 else f"each of {count} ranks"


def _told(shares: Sequence[Share], total: int, trained: int) -> str:
    held = f"{_span([s.parameters for s in shares])} of {total:,} parameters"
    if trained < total:
        held += f" ({_span([s.trained for s in shares])} of {trained:,} trained ones)"
    sizes = [size(f([s.bytes for s in shares])) for f in (min, max)]
    return f"{held}, {' to '.join(dict.fromkeys(sizes))}"


def _span(numbers: Sequence[int]) -> str:
    return " to ".join(dict.fromkeys(f"{f(numbers):,}" for f in (min, max)))

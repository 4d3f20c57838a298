"""All ranks have the same model, or all say what differs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from core_plugin.errors import RankMismatchError
from core_plugin.tensors import canonical_name

T = TypeVar("T")

ROWS = 20
"""How many differences are told."""


def require_equal_models(model: nn.Module) -> None:
    """Compare the parameters and buffers of all ranks' models, as they are described. Collective.

    torch compares their number alone, or hangs when shapes differ.

    Raises:
        RankMismatchError: On every rank, with a table of what differs.
    """
    own = _description(model)
    digest = hashlib.sha256(repr(own).encode()).hexdigest()
    if len(set(_gathered(digest))) > 1:
        raise RankMismatchError(_told(_gathered(own)))


def _gathered(own: T) -> list[T]:
    found: list[T] = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def _description(model: nn.Module) -> list[tuple[str, str]]:
    """The tensors in their order, which is the order that torch exchanges their gradients in."""
    trained = [(n, f"{_kind(p)}, {_training(p)}") for n, p in model.named_parameters()]
    buffers = [(n, f"{_kind(b)}, a buffer") for n, b in model.named_buffers()]
    return [(canonical_name(name), what) for name, what in trained + buffers]


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _training(parameter: nn.Parameter) -> str:
    return "trained" if parameter.requires_grad else "frozen"


def _told(found: Sequence[Sequence[tuple[str, str]]]) -> str:
    tables = [dict(of_rank) for of_rank in found]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [
        f"{name}: {_by_rank([table.get(name, '(not there)') for table in tables])}"
        for name in names
        if len({table.get(name) for table in tables}) > 1
    ]
    rows = rows or [_order(found)]
    more = [f"... and {len(rows) - ROWS} more"] if len(rows) > ROWS else []
    return (
        "ddp: the ranks have different models:\n  "
        + "\n  ".join(rows[:ROWS] + more)
        + "\nall ranks must build the same parameters in the same order; what they are must not "
        "depend on the rank, on its data or on what is random"
    )


def _order(found: Sequence[Sequence[tuple[str, str]]]) -> str:
    """The first place where the order is another one."""
    at = next(places for places in zip(*found, strict=True) if len(set(places)) > 1)
    return f"another order: {_by_rank([name for name, _ in at])}"


def _by_rank(values: Sequence[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return "; ".join(f"{value} (rank {', '.join(of)})" for value, of in ranks.items())

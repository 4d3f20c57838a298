"""A run without processes, memory or steps: what each rank would hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from core_plugin import tensors
from core_plugin.config import RunConfig
from core_plugin.errors import ConfigError, CorePluginError
from core_plugin.training import assembly, blocks, placement
from core_plugin.types.distributed import MemoryPlan


@dataclass(frozen=True)
class DryRun:
    """What a run would be."""

    model: nn.Module
    """On ``meta``, before it is sharded."""
    blocks: dict[str, int]
    """How many repeated blocks there are of each class."""
    ranks: dict[int, MemoryPlan]
    """What the strategy and the optimizer would keep, on the first rank and on the last one."""
    planned: MemoryPlan
    """What the strategy's own ``plan_memory`` says."""
    fault: str | None
    """Why the optimizer could not be measured; ``planned`` has its bytes then."""
    described: Sequence[Mapping[str, Any]]
    """What the optimizer of the first rank says of each parameter; empty if it says nothing."""


def dry_run(config: RunConfig, world_size: int) -> DryRun:
    """Build the model on ``meta``, shard it as a rank would, and measure; no device is touched.

    Ranks whose shards are uneven hold the most at the beginning and the least at the end, so the
    first and the last one tell of all.

    Args:
        config: The run.
        world_size: The number of ranks.

    Raises:
        ConfigError: The number does not fit the run's strategy, or what :func:`assembly.spread`
            raises.
    """
    if world_size < 1:
        raise ConfigError(f"--world-size must be at least 1, got {world_size}")
    vocabulary_size = assembly.tokenizer_of(config).get_vocab_size()
    model = assembly.build_model(config, vocabulary_size)
    strategy = config["distributed"]
    planned = strategy.implementation.plan_memory(model, strategy.params, world_size)
    kinds = Counter(blocks.class_name(b) for b in blocks.repeated_blocks(config, model))
    measured = {}
    for rank in sorted({0, world_size - 1}):
        with fake_ranks(rank, world_size):
            measured[rank] = _measure(config, vocabulary_size, world_size, planned)
    ranks = {rank: one.memory for rank, one in measured.items()}
    fault = next((one.fault for one in measured.values() if one.fault), None)
    return DryRun(model, dict(kinds), ranks, planned, fault, measured[0].described)


@contextmanager
def fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    """A process group in which nothing is exchanged, and this process is one of many."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it holds meshes of these groups, equal to those of the next


@dataclass(frozen=True)
class _Measured:
    """One rank, as in :class:`DryRun`."""

    memory: MemoryPlan
    fault: str | None
    described: Sequence[Mapping[str, Any]]


def _measure(
    config: RunConfig, vocabulary_size: int, world_size: int, planned: MemoryPlan
) -> _Measured:
    """This rank: its bytes, and what its optimizer says."""
    model = assembly.build_model(config, vocabulary_size)
    model = assembly.spread(config, model, torch.device("cpu"), world_size, lambda part: None)
    unwrapped = config["distributed"].implementation.unwrap_model(model)
    trained = [p for p in unwrapped.parameters() if p.requires_grad]
    gradients = sum(_bytes(p) for p in trained)
    optimizer = assembly.build_optimizer(config, model)
    describe = getattr(optimizer, "describe_parameters", None)
    described = describe() if describe else []
    fault, kept = None, planned.optimizer
    try:
        kept = _optimizer_bytes(optimizer, trained)
    except CorePluginError:
        raise
    except Exception as error:  # not every optimizer takes a step without values
        fault = f"{type(error).__name__}: {error}"
    memory = MemoryPlan(placement.share(unwrapped).bytes, gradients, kept)
    return _Measured(memory, fault, described)


def _optimizer_bytes(optimizer: Optimizer, trained: list[nn.Parameter]) -> int:
    """What an optimizer keeps after its first step."""
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    values = (value for entries in optimizer.state.values() for value in entries.values())
    return sum(_bytes(value) for value in values if isinstance(value, torch.Tensor))


def _bytes(tensor: torch.Tensor) -> int:
    part = tensors.local(tensor)
    return part.numel() * part.itemsize

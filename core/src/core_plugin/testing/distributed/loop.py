"""What a training loop does with a strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, AdamW, Optimizer

from core_plugin import tensors
from core_plugin.errors import ConfigError
from core_plugin.testing.distributed.batches import Batch, batch, loss_sum, share
from core_plugin.testing.distributed.networks import Network, initialize, on_meta
from core_plugin.testing.processes import NotHereError
from core_plugin.training.materialize import Materializer
from core_plugin.types.distributed import BaseDistributed, ShardContext

CPU = torch.device("cpu")
STEPS = 3
MAX_NORM = 0.05
"""Less than any gradients' norm here, so that clipping changes them."""

Values = dict[str, Tensor]
Materialize = Callable[[nn.Module], None]


def adamw(parameters: Iterable[nn.Parameter]) -> AdamW:
    """AdamW with an eps that keeps the rounding errors of tiny gradients small."""
    return AdamW(parameters, lr=0.02, eps=1e-2)


def sgd(parameters: Iterable[nn.Parameter]) -> SGD:
    """SGD with momentum."""
    return SGD(parameters, lr=0.1, momentum=0.9)


MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Trained:
    """What several steps gave."""

    norms: list[float]
    values: Values


class Loop:
    """What a training loop does with a strategy, on one rank.

    Args:
        strategy: The strategy.
        params: Its parameters.
        rank: The rank.
        world_size: The number of ranks.
    """

    def __init__(
        self, strategy: type[BaseDistributed], params: Any, rank: int, world_size: int
    ) -> None:
        self.strategy = strategy
        self.params = params
        self.rank = rank
        self.world_size = world_size
        self.holder = strategy.parameter_device(params, CPU)
        """Where the parameters are between steps."""

    @functools.cached_property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the ranks."""
        try:
            return self.strategy.create_mesh(self.params, CPU.type, self.world_size)
        except ConfigError as error:
            raise NotHereError(f"not on {self.world_size} ranks: {error}") from error

    @functools.cached_property
    def divisor(self) -> float:
        """What the sum of the ranks' gradients is divided by."""
        return self.strategy.gradient_divisor(self.params, self.world_size)

    # A model

    def shard(
        self, model: Network, materialize: Materialize, computed: torch.dtype = torch.float32
    ) -> nn.Module:
        """Spread a model that is on ``meta``."""
        context = ShardContext(
            device=CPU,
            mesh=self.mesh,
            materialize=materialize,
            blocks=list(model.blocks),
            dtype=computed,
        )
        return self.strategy.shard_model(model, self.params, context)

    def model(
        self, kind: str = "plain", *, seed: int = 0, computed: torch.dtype = torch.float32
    ) -> nn.Module:
        """A network that is spread, with its values, and in training.

        Args:
            kind: Which one of ``KINDS``.
            seed: Another one gives other values.
            computed: The precision to compute in.
        """
        mesh = self.mesh  # ahead of the model, since there may be none for these ranks
        assert mesh is None or mesh.size() == self.world_size
        model = on_meta(kind)
        return self.shard(model, materializer(model, seed, self.holder), computed).train()

    def unwrapped(self, model: nn.Module) -> Network:
        """The network inside, as the architecture made it."""
        network = self.strategy.unwrap_model(model)
        assert isinstance(network, Network), f"unwrap_model gives a {type(network).__name__}"
        return network

    def values(self, model: nn.Module) -> Values:
        """The parameters and persistent buffers by name, whole. Collective."""
        return values(self.unwrapped(model))

    def gradients(self, model: nn.Module) -> Values:
        """The gradients that are there by name, whole. Collective."""
        return gradients(self.unwrapped(model))

    # Steps

    def backward(
        self,
        model: nn.Module,
        whole: Batch,
        micro_batch_size: int | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        """The forward and backward passes of a step, over this rank's share of the batch.

        The loss is the mean over all supervised tokens of the whole batch.
        """
        parts = share(whole, self.rank, self.world_size, micro_batch_size or len(whole.ids))
        for number, part in enumerate(parts, 1):
            last = number == len(parts)
            self.micro_step(model, part, self.divisor / whole.tokens, last, autocast)

    def micro_step(
        self,
        model: nn.Module,
        part: Batch,
        factor: float,
        last: bool,
        autocast: torch.dtype | None = None,
    ) -> None:
        """The forward and backward pass of one micro-batch."""
        with self.strategy.gradient_sync(model, last):
            with _autocast(autocast):
                loss = loss_sum(model, part)
            (loss * factor).backward()

    def step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        whole: Batch,
        max_norm: float | None = None,
        micro_batch_size: int | None = None,
    ) -> float:
        """A step; the norm of the gradients is returned."""
        self.backward(model, whole, micro_batch_size)
        norm = self.strategy.clip_grad_norm(model, max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def optimizer(self, model: nn.Module, make: MakeOptimizer = adamw) -> Optimizer:
        """An optimizer of what is trained."""
        return make([p for p in model.parameters() if p.requires_grad])

    def train(
        self,
        model: nn.Module,
        make: MakeOptimizer = adamw,
        steps: Sequence[int] = range(STEPS),
        max_norm: float | None = None,
    ) -> tuple[Trained, Optimizer]:
        """Several steps, each with a batch of its own; what they gave, and the optimizer."""
        optimizer = self.optimizer(model, make)
        norms = [self.step(model, optimizer, batch(step), max_norm) for step in steps]
        return Trained(norms, self.values(model)), optimizer


def _autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(CPU.type, dtype)


def materializer(model: nn.Module, seed: int = 0, holder: torch.device = CPU) -> Materializer:
    """Gives parts of a model on ``meta`` their memory and values."""
    return Materializer(model, CPU, seed, initialize, str, parameter_device=holder)


def values(model: nn.Module) -> Values:
    """The parameters and persistent buffers by name, whole."""
    return {n: tensors.gather(t.detach()).clone() for n, t in tensors.model_tensors(model).items()}


def gradients(model: nn.Module) -> Values:
    """The gradients that are there by name, whole."""
    trained = tensors.trained_parameters(model).items()
    return {n: tensors.gather(p.grad).clone() for n, p in trained if p.grad is not None}


def gathered(value: Any) -> list[Any]:
    """Every rank's value. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found

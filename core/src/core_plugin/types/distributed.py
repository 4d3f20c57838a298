"""Distributed strategies: how a model is spread over the ranks."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from core_plugin.contract import Implementation
from core_plugin.errors import ConfigError
from core_plugin.plugin import BasePlugin
from core_plugin.privateuse1 import NO_CAPABILITIES, DeviceCapabilities

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What a strategy does, as far as a training loop has to know."""

    multiple_processes: bool = True
    """It keeps the model the same on several ranks; without it a run of several is refused."""
    averages_gradients: bool = True
    """Gradients are averaged over the ranks; without it they are summed."""
    sharded_state: bool = False
    """Each rank holds a part of the parameters; that it does is checked after sharding."""
    mixed_precision: bool = False
    """It casts to the training precision itself; without it the loop uses autocast."""


@dataclasses.dataclass(frozen=True)
class ShardContext:
    """What a strategy is given to shard a model with."""

    device: torch.device
    mesh: DeviceMesh | None
    """What ``create_mesh`` returned."""
    materialize: Callable[[nn.Module], None]
    """Gives a part of the model that is on ``meta`` its memory and its values, on the device.

    The values depend on the seed and on the parameters' names alone: they are equal on all ranks,
    and for any order and division of the calls. Parts that are real already are left alone.
    """
    blocks: Sequence[nn.Module]
    """The model's repeated blocks, outermost first; empty if the architecture names none."""
    dtype: torch.dtype
    """The precision to compute in; parameters and gradients stay float32."""
    device_capabilities: DeviceCapabilities = NO_CAPABILITIES
    """What the device declares that it can do, averaging in its collective library included."""

    def averages_in_collective(self, wanted: Literal["auto"] | bool) -> bool:
        """Whether the collective library is to average gradients; otherwise it sums them.

        Args:
            wanted: The strategy's parameter ``average_in_collective``. ``auto`` averages where the
                device declares that its library can.

        Raises:
            ConfigError: It is True, and the device does not declare it.
        """
        declared = self.device_capabilities.average_in_collectives
        if wanted is True and not declared:
            raise ConfigError(
                f"distributed.average_in_collective is true, but the device {self.device.type!r} "
                "does not declare the capability average_in_collectives: its collective library "
                "cannot average; set it to auto or false, and gradients are summed and divided"
            )
        return declared if wanted == "auto" else wanted


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.parameters + self.gradients + self.optimizer


class BaseDistributed(Implementation, abstract=True):
    """A strategy. The methods with a body are right for every model whose sharded parameters are
    ``DTensor``s and whose other parameters are equal on all ranks.
    """  # noqa: D205

    capabilities: ClassVar[Capabilities] = Capabilities()

    @staticmethod
    @abstractmethod
    def create_mesh(params: Any, device_type: str, world_size: int) -> DeviceMesh | None:
        """The mesh of the ranks, or None for a strategy that needs none.

        Raises:
            ConfigError: The world size does not fit the parameters.
        """

    @staticmethod
    @abstractmethod
    def shard_model(model: nn.Module, params: Any, context: ShardContext) -> nn.Module:
        """Spread a model that is on ``meta``, materialising all of it.

        Returns:
            What the loop calls in place of the model: the same object, or a wrapper.
        """

    @staticmethod
    @abstractmethod
    def unwrap_model(model: nn.Module) -> nn.Module:
        """The model inside what ``shard_model`` returned, with the architecture's own names."""

    @staticmethod
    @abstractmethod
    def gradient_sync(model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """A context for the forward and backward pass of one micro-batch.

        Args:
            model: What ``shard_model`` returned.
            enabled: Whether gradients are exchanged; False for all but a step's last one.
        """

    @staticmethod
    def clip_grad_norm(model: nn.Module, max_norm: float | None) -> torch.Tensor:
        """Scale the gradients so that their global 2-norm is at most ``max_norm``.

        Returns:
            The norm before, over all ranks' parts: a scalar that is equal on all ranks. With
            ``max_norm`` None nothing is scaled.
        """
        from core_plugin.state import clip_grad_norm

        return clip_grad_norm(model.parameters(), max_norm)

    @classmethod
    def save_checkpoint(
        cls, model: nn.Module, optimizer: Optimizer, directory: Path, *, include_frozen: bool
    ) -> None:
        """Write the model's and the optimizer's tensors in the common format.

        Called on all ranks. Another strategy, on another number of ranks, can load them.

        Args:
            model: What ``shard_model`` returned.
            optimizer: Its optimizer.
            directory: An empty one, the same for all ranks.
            include_frozen: Write the parameters that are not trained, too.
        """
        from core_plugin import state

        state.save(cls.unwrap_model(model), optimizer, directory, include_frozen=include_frozen)

    @classmethod
    def load_checkpoint(
        cls, model: nn.Module, optimizer: Optimizer, directory: Path, *, include_frozen: bool
    ) -> None:
        """Read what some strategy's ``save_checkpoint`` wrote, on some number of ranks.

        The arguments are those of :meth:`save_checkpoint`.

        Raises:
            CheckpointError: A tensor is missing, extra, or of another shape.
        """
        from core_plugin import state

        state.load(cls.unwrap_model(model), optimizer, directory, include_frozen=include_frozen)

    @classmethod
    def full_state_dict(cls, model: nn.Module, trainable: bool) -> dict[str, torch.Tensor]:
        """The whole tensors, on the CPU of rank 0; the other ranks take part and get ``{}``.

        Args:
            model: What ``shard_model`` returned.
            trainable: Only the parameters that are trained.
        """
        from core_plugin import state

        return state.full_state_dict(cls.unwrap_model(model), trainable)

    @classmethod
    def plan_memory(cls, model: nn.Module, world_size: int) -> MemoryPlan:
        """The bytes on one rank, for a model on ``meta``, float32 and an AdamW-like optimizer."""
        share = world_size if cls.capabilities.sharded_state else 1
        total = sum(p.numel() for p in model.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return MemoryPlan(
            4 * -(-total // share), 4 * -(-trained // share), 8 * -(-trained // share)
        )


class DistributedPlugin(BasePlugin, contract=BaseDistributed):
    """The type of distributed strategies."""

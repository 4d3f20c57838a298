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
    from torch.distributed import ProcessGroup
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
    and for any order and division of the calls. Parts that are real already are left alone. Of a
    parameter that is a ``DTensor`` on ``meta`` each rank makes, and reads, its own part alone. In a
    dry run it does nothing: the model stays on ``meta``.
    """
    blocks: Sequence[nn.Module]
    """The model's repeated blocks, outermost first; empty if it has none that are found."""
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

        It is also called for a dry run, with a ``materialize`` that does nothing and over a
        process group that exchanges nothing: no value may be looked at then.

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
    def parameter_device(params: Any, device: torch.device) -> torch.device:
        """Where parameters stay between steps: the device, or the host they are offloaded to."""
        return device

    @classmethod
    def gradient_divisor(cls, params: Any, world_size: int) -> float:
        """What the sum of the ranks' gradients is divided by when they are exchanged.

        The loss is scaled by it, so that training does not depend on it.
        """
        return world_size if cls.capabilities.averages_gradients else 1

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
    def stage_checkpoint(
        cls, model: nn.Module, optimizer: Optimizer, *, include_frozen: bool
    ) -> Callable[[Path, ProcessGroup | None], None]:
        """Copy what :meth:`save_checkpoint` writes to the host, so that training can go on.

        The arguments are those of :meth:`save_checkpoint`. A strategy that overrides that one
        overrides this one as well, or is not saved asynchronously.

        Returns:
            What writes the copies into a directory. It is called on all ranks, in a thread of its
            own, and exchanges nothing but over the group that it is given (None in a single
            process that has no groups).
        """
        from core_plugin import state

        return state.stage(cls.unwrap_model(model), optimizer, include_frozen=include_frozen)

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
    def plan_memory(cls, model: nn.Module, params: Any, world_size: int) -> MemoryPlan:
        """The bytes on the rank that holds most, for a model on ``meta``.

        The default is right for an AdamW-like optimizer and parameters that are whole on each
        rank or, with ``sharded_state``, split by rows over all of them.
        """
        ranks = world_size if cls.capabilities.sharded_state else 1
        parts = [(_largest_part(p, ranks), p.requires_grad) for p in model.parameters()]
        trained = sum(part for part, is_trained in parts if is_trained)
        return MemoryPlan(sum(part for part, _ in parts), trained, 2 * trained)


def _largest_part(tensor: torch.Tensor, ranks: int) -> int:
    """The bytes of the largest of the parts that a tensor's rows are split into."""
    rows = tensor.shape[0] if tensor.ndim else 1
    row = tensor.numel() // max(rows, 1)
    return -(-rows // ranks) * row * tensor.itemsize


class DistributedPlugin(BasePlugin, contract=BaseDistributed):
    """The type of distributed strategies."""

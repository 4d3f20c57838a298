"""The entry point: parameters and the strategy; torch is imported where it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from core_plugin.params import require
from core_plugin.types import BaseDistributed, Capabilities
from core_plugin.types.distributed import ShardContext

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from core_plugin.config import RunConfig
    from core_plugin_ddp.parallel import Parallel


@dataclass(frozen=True)
class PowerSGDParams:
    """How PowerSGD approximates the gradients of matrices; what it leaves out is added later.

    It costs as much memory as the gradients, and as much again in each rank's part of a checkpoint.

    Attributes:
        rank: The rank of the approximation: higher is nearer to the gradient, and more to send.
        start_step: How many steps are exchanged in full before.
    """

    rank: int = 1
    start_step: int = 1000

    def __post_init__(self) -> None:
        require(
            (self.rank >= 1, f"rank must be at least 1, got {self.rank}"),
            (
                self.start_step >= 2,
                f"start_step must be at least 2, since torch arranges gradients anew after the "
                f"first step, got {self.start_step}",
            ),
        )


@dataclass(frozen=True)
class DDPParams:
    """How gradients are exchanged; see ``torch.nn.parallel.DistributedDataParallel``.

    Attributes:
        bucket_cap_mb: MiB of gradients in one all-reduce.
        gradient_as_bucket_view: Let gradients share the buckets' memory.
        static_graph: Every step uses the same parameters in the same order; the unused ones of the
            first step are never looked for again.
        find_unused_parameters: Look for parameters without a gradient in every step; without it
            one that has none is an error, which names it.
        average_in_collective: Let the collective library average gradients (true), or sum them and
            divide (false); auto averages where the device declares that its library can.
        compression: What is sent instead of the gradients: half precision (fp16 loses what is below
            6e-8, bf16 digits), or low-rank approximations (powersgd).
        powersgd: The parameters of that compression.
    """

    bucket_cap_mb: float = 25.0
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    find_unused_parameters: bool = False
    average_in_collective: Literal["auto"] | bool = "auto"
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    powersgd: PowerSGDParams = PowerSGDParams()

    def __post_init__(self) -> None:
        require(
            (
                self.bucket_cap_mb > 0,
                f"bucket_cap_mb must be positive, got {self.bucket_cap_mb}",
            ),
            (
                not (self.static_graph and self.find_unused_parameters),
                "static_graph finds the unused parameters in the first step; leave "
                "find_unused_parameters out, or static_graph if they are others in other steps",
            ),
            (
                not (self.compression != "none" and self.average_in_collective is True),
                f"average_in_collective does not go with compression: {self.compression} divides "
                "before it sums; leave one of them out",
            ),
            (
                self.compression == "powersgd" or self.powersgd == PowerSGDParams(),
                f"powersgd has parameters, but compression is {self.compression}; set it to "
                "powersgd, or leave them out",
            ),
        )

    def faults(self, run: RunConfig) -> Iterator[str]:
        """What torch cannot do in this run, and what would have no effect in it."""
        launcher = run["launcher"]
        ranks = launcher.implementation.processes(launcher.params)
        if self.static_graph and run.train.global_batch_size > run.train.micro_batch_size * ranks:
            yield (
                "static_graph does not go with several micro-batches in a step; raise "
                "train.micro_batch_size, or leave static_graph out"
            )
        if self.compression == "powersgd" and self.powersgd.start_step >= run.train.steps:
            yield (
                f"powersgd.start_step is {self.powersgd.start_step}, but the run has "
                f"{run.train.steps} steps: nothing would be compressed; lower it"
            )


class DDP(BaseDistributed):
    """Every rank holds the whole model; gradients are averaged in buckets during backward."""

    Params = DDPParams
    capabilities: ClassVar[Capabilities] = Capabilities()

    @staticmethod
    def create_mesh(params: DDPParams, device_type: str, world_size: int) -> DeviceMesh | None:
        """None: the ranks are the default process group."""
        return None

    @staticmethod
    def shard_model(model: nn.Module, params: DDPParams, context: ShardContext) -> nn.Module:
        """Materialise the model on every rank and wrap it.

        Raises:
            ConfigError: No parameter is trained, or the device or its collective library does not
                exchange gradients as asked for.
            RankMismatchError: The ranks have different models.
        """
        from core_plugin.errors import ConfigError
        from core_plugin_ddp import exchange
        from core_plugin_ddp.agreement import require_equal_models
        from core_plugin_ddp.parallel import Parallel

        averages = context.averages_in_collective(params.average_in_collective)
        require_equal_models(model)
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError("ddp: no parameter of the model is trained; there is nothing to do")
        context.materialize(model)
        parallel = Parallel(model, params, context.device)
        if params.compression == "powersgd":
            exchange.approximate(parallel, params.powersgd.rank, params.powersgd.start_step)
        elif params.compression != "none":
            exchange.compress(parallel, params.compression)
        elif averages:
            exchange.average_in_collective(parallel)
        return parallel

    @staticmethod
    def unwrap_model(model: nn.Module) -> nn.Module:
        """The module inside the wrapper."""
        return cast("Parallel", model).module  # type: ignore[no-any-return]

    @staticmethod
    def gradient_sync(model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Reduce the gradients in this pass's backward, or keep them on the rank.

        Raises:
            TrainingError: On leaving it, where a parameter has no gradient to exchange.
        """
        return cast("Parallel", model).micro_batch(exchange=enabled)

    @classmethod
    def save_checkpoint(
        cls, model: nn.Module, optimizer: Optimizer, directory: Path, *, include_frozen: bool
    ) -> None:
        """Write the tensors, and what compression has left out of the gradients so far."""
        if power_sgd := cast("Parallel", model).power_sgd:
            power_sgd.stage()(directory)  # first: the tensors' end is agreed upon by all ranks
        super().save_checkpoint(model, optimizer, directory, include_frozen=include_frozen)

    @classmethod
    def stage_checkpoint(
        cls, model: nn.Module, optimizer: Optimizer, *, include_frozen: bool
    ) -> Callable[[Path, ProcessGroup | None], None]:
        """Copy all that :meth:`save_checkpoint` writes to the host."""
        write_tensors = super().stage_checkpoint(model, optimizer, include_frozen=include_frozen)
        power_sgd = cast("Parallel", model).power_sgd
        if power_sgd is None:
            return write_tensors
        write_memory = power_sgd.stage()

        def write(directory: Path, group: ProcessGroup | None) -> None:
            write_memory(directory)
            write_tensors(directory, group)

        return write

    @classmethod
    def load_checkpoint(
        cls, model: nn.Module, optimizer: Optimizer, directory: Path, *, include_frozen: bool
    ) -> None:
        """Read the tensors, and what compression had left out, if it was there and is here."""
        super().load_checkpoint(model, optimizer, directory, include_frozen=include_frozen)
        if power_sgd := cast("Parallel", model).power_sgd:
            power_sgd.load(directory)

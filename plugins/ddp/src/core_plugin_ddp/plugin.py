"""The entry point: parameters and the strategy; torch is imported where it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from core_plugin.types import BaseDistributed, Capabilities
from core_plugin.types.distributed import ShardContext

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel import DistributedDataParallel

    from core_plugin.config import RunConfig


@dataclass(frozen=True)
class DDPParams:
    """How gradients are exchanged; see ``torch.nn.parallel.DistributedDataParallel``.

    Attributes:
        bucket_cap_mb: MiB of gradients in one all-reduce.
        gradient_as_bucket_view: Let gradients share the buckets' memory.
        static_graph: Every step uses the same parameters in the same order.
        find_unused_parameters: Look for parameters without a gradient in every step.
        average_in_collective: Let the collective library average gradients (true), or sum them and
            divide (false); auto averages where the device declares that its library can.
    """

    bucket_cap_mb: float = 25.0
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    find_unused_parameters: bool = False
    average_in_collective: Literal["auto"] | bool = "auto"

    def __post_init__(self) -> None:
        if not self.bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb must be positive, got {self.bucket_cap_mb}")

    def faults(self, run: RunConfig) -> Iterator[str]:
        """What torch cannot do in this run."""
        launcher = run["launcher"]
        ranks = launcher.implementation.processes(launcher.params)
        if self.static_graph and run.train.global_batch_size > run.train.micro_batch_size * ranks:
            yield (
                "static_graph does not go with several micro-batches in a step; raise "
                "train.micro_batch_size, or leave static_graph out"
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
            ConfigError: No parameter is trained, or the device does not average as asked for.
        """
        from torch.nn.parallel import DistributedDataParallel

        from core_plugin.errors import ConfigError
        from core_plugin_ddp.averaging import average_in_collective

        averages = context.averages_in_collective(params.average_in_collective)
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError("ddp: no parameter of the model is trained; there is nothing to do")
        context.materialize(model)
        parallel = DistributedDataParallel(
            model,
            device_ids=None if context.device.type == "cpu" else [context.device],
            init_sync=False,  # materialisation gives all ranks the same values
            bucket_cap_mb=params.bucket_cap_mb,
            gradient_as_bucket_view=params.gradient_as_bucket_view,
            static_graph=params.static_graph,
            find_unused_parameters=params.find_unused_parameters,
        )
        if averages:
            average_in_collective(parallel)
        return parallel

    @staticmethod
    def unwrap_model(model: nn.Module) -> nn.Module:
        """The module inside the wrapper."""
        return cast("DistributedDataParallel", model).module  # type: ignore[no-any-return]

    @staticmethod
    def gradient_sync(model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Reduce the gradients in this pass's backward, or keep them on the rank."""
        return nullcontext() if enabled else cast("DistributedDataParallel", model).no_sync()

"""torch's DistributedDataParallel, with errors that name parameters and equal buffers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from core_plugin.errors import TrainingError
from core_plugin.tensors import canonical_name
from core_plugin_ddp.statistics import Statistics

if TYPE_CHECKING:
    from core_plugin_ddp.plugin import DDPParams
    from core_plugin_ddp.powersgd import PowerSGD

UNUSED = re.compile(r"Parameter indices which did not receive grad for rank \d+:((?: \d+)+)")
"""How torch names them: by the place among those that are trained."""
TWICE = re.compile(r"Parameter at index \d+ with name (\S+) has been marked as ready twice")
CHANGED = "Your training graph has changed in this iteration"


class Parallel(DistributedDataParallel):
    """A materialised model, the same on all ranks, whose gradients are averaged over them."""

    def __init__(self, model: nn.Module, params: DDPParams, device: torch.device) -> None:
        super().__init__(
            model,
            device_ids=None if device.type == "cpu" else [device],
            init_sync=False,  # materialisation gives all ranks the same values
            forward_sync_buffers=False,  # they are averaged after the step instead
            bucket_cap_mb=params.bucket_cap_mb,
            gradient_as_bucket_view=params.gradient_as_bucket_view,
            static_graph=params.static_graph,
            find_unused_parameters=params.find_unused_parameters,
        )
        self.power_sgd: PowerSGD | None = None
        self._statistics = Statistics(model, self.process_group)

    @contextmanager
    def micro_batch(self, *, exchange: bool) -> Iterator[None]:
        """The forward and backward pass of a micro-batch; the last one of a step exchanges.

        Raises:
            TrainingError: A parameter had no part in it, and torch was not told to expect that.
        """
        self._statistics.remember()
        with self._errors_with_names(), nullcontext() if exchange else self.no_sync():
            yield
            if exchange:
                # torch would look for unused parameters in the next forward pass only, after a
                # step with gradients that were not exchanged. This is what it calls there.
                self.reducer._rebuild_buckets()
        if exchange:
            self._statistics.average()

    def trained_names(self) -> list[str]:
        """The names of the parameters in the order that torch numbers them in."""
        return [
            canonical_name(name)
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and name not in self.parameters_to_ignore
        ]

    @contextmanager
    def _errors_with_names(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if told := self._told(str(error)):
                raise TrainingError(f"ddp: rank {self._distributed_rank}: {told}") from error
            raise

    def _told(self, error: str) -> str:
        """What a user has to know of torch's error; empty if it is none of these."""
        if unused := UNUSED.search(error):
            trained = self.trained_names()
            return self._unused([trained[int(number)] for number in unused[1].split()])
        if twice := TWICE.search(error):
            return (
                f"{twice[1]} gets its gradient more than once in a backward pass, as by reentrant "
                "checkpoints of a module that is used several times; use those that are not "
                "reentrant, or set distributed.static_graph to true"
            )
        if CHANGED in error:
            return (
                "static_graph is true, but this step uses parameters that the first step did not "
                "use; leave static_graph out, and set distributed.find_unused_parameters to true"
            )
        return ""

    def _unused(self, names: list[str]) -> str:
        remedy = (
            "leave static_graph out, since not every step uses the same parameters, and set "
            "distributed.find_unused_parameters to true"
            if self.static_graph
            else "if that is meant, set distributed.find_unused_parameters to true (each step then "
            "looks for them), or freeze them if no step uses them"
        )
        return (
            "these parameters are trained, but have no part in the loss of the step's last "
            "micro-batch, so that their gradients cannot be exchanged:\n  "
            + "\n  ".join(names)
            + f"\n{remedy}"
        )

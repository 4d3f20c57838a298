"""What is done with a bucket of gradients when it is exchanged; one function of these at most.

torch itself divides by the number of ranks, and sums.
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)

from core_plugin.errors import ConfigError
from core_plugin_ddp.parallel import Parallel
from core_plugin_ddp.powersgd import PowerSGD

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def average_in_collective(model: Parallel) -> None:
    """Reduce the model's buckets with ``ReduceOp.AVG`` from now on.

    A group of one rank is left as it is: NCCL's average over one rank may be wrong.
    """
    if model.process_group.size() > 1:
        model.register_comm_hook(model.process_group, _all_reduce_average)


def compress(model: Parallel, dtype: str) -> None:
    """Exchange the model's buckets in half precision from now on. Collective.

    Raises:
        ConfigError: On every rank: the collective library does not add up in it.
    """
    if model.process_group.size() == 1:
        return
    if model.device.type != "meta":  # in a dry run nothing is added up
        _require_sums(model.process_group, model.device, dtype)
    hooks = {"fp16": fp16_compress_hook, "bf16": _bf16}
    model.register_comm_hook(model.process_group, hooks[dtype])


def approximate(model: Parallel, rank: int, start_step: int) -> None:
    """Exchange low-rank approximations of the model's gradients after so many steps.

    Raises:
        ConfigError: The model trains something that cannot be approximated.
    """
    if model.process_group.size() > 1:
        model.power_sgd = PowerSGD(model.module, model.process_group, rank, start_step)
        model.register_comm_hook(model.power_sgd, PowerSGD.exchange)


def _require_sums(group: dist.ProcessGroup, device: torch.device, dtype: str) -> None:
    ones = torch.ones(2, dtype=DTYPES[dtype], device=device)
    try:
        dist.all_reduce(ones, group=group)
        fault = "" if (ones == group.size()).all() else f"1 + 1 + ... is {ones[0].item()}"
    except RuntimeError as error:
        fault = str(error).partition("\n")[0]
    if fault:
        raise ConfigError(
            f"distributed.compression is {dtype}, but the collective library {group.name()} of "
            f"{device.type!r} does not add up in it ({fault}); choose another one, or none"
        )


# torch compares these annotations with the classes themselves: they must not be strings.
def _bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """By itself, torch takes its hook on NCCL and XCCL only; others were asked, and can do it."""
    return bf16_compress_hook(group, bucket)


def _all_reduce_average(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    gradients = bucket.buffer()
    if gradients.dtype == torch.float16:
        return allreduce_hook(group, bucket)  # divides first: the sum could overflow
    work = dist.all_reduce(gradients, dist.ReduceOp.AVG, group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]

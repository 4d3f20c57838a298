"""Averaging gradients in the all-reduce itself; torch's own way is to divide and then to sum."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


def average_in_collective(model: DistributedDataParallel) -> None:
    """Reduce the model's buckets with ``ReduceOp.AVG`` from now on.

    A group of one rank is left as it is: NCCL's average over one rank may be wrong.
    """
    if model.process_group.size() > 1:
        model.register_comm_hook(model.process_group, _all_reduce_average)


# torch compares these annotations with the classes themselves: they must not be strings.
def _all_reduce_average(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    gradients = bucket.buffer()
    if gradients.dtype == torch.float16:
        return allreduce_hook(group, bucket)  # divides first: the sum could overflow
    work = dist.all_reduce(gradients, dist.ReduceOp.AVG, group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]

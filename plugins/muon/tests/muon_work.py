"""Scenarios of real ranks: how much they compute and send."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from muon_model import SMALL, Parts, assert_same, in_groups, run, set_gradients, sharded
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.flop_counter import FlopCounterMode

from core_plugin_muon import Muon


@contextmanager
def exchanges() -> Iterator[list[tuple[torch.Tensor, int]]]:
    """What this rank gives to all-to-alls, and how many elements of it are for itself."""
    exchanged = []
    all_to_all = dist.all_to_all_single

    def counted(output, source, *sizes, **options) -> object:
        exchanged.append((source, sizes[1][dist.get_rank()]))
        return all_to_all(output, source, *sizes, **options)

    dist.all_to_all_single = counted
    try:
        yield exchanged
    finally:
        dist.all_to_all_single = all_to_all


def work_is_shared(directory: Path) -> None:
    """The ranks compute together what one process does, in two all-to-alls a bucket."""
    ranks = dist.get_world_size()
    model, reference = sharded(), Parts()
    muon, other = in_groups(model, bucket_cap_mb=0.004), in_groups(reference)
    run(model, muon, range(1))
    run(reference, other, range(1))
    plan = muon.teams()[0][0].exchange.plan
    assert len(plan.buckets) > 1
    with FlopCounterMode(display=False) as once:
        run(reference, other, range(1, 2))
    with exchanges() as exchanged, FlopCounterMode(display=False) as here:
        run(model, muon, range(1, 2))
    flops: list[int] = [0] * ranks
    dist.all_gather_object(flops, here.get_total_flops())
    assert sum(flops) == once.get_total_flops() == sum(plan.costs)
    assert flops == plan.loads
    assert len(exchanged) == 2 * len(plan.buckets)
    sent = sum(len(source) - kept for source, kept in exchanged)
    assert sent == elements_to_send(plan, dist.get_rank())


def elements_to_send(plan: object, rank: int) -> int:
    """A rank's rows of what others own, and the others' rows of what it owns."""
    count = 0
    for matrix, owner in zip(plan.matrices, plan.owners, strict=True):
        here = len(matrix.on_rank(rank)) * matrix.columns
        count += matrix.rows * matrix.columns - here if owner == rank else here
    return count


def all_gathers_are_few(directory: Path) -> None:
    model = Parts()
    muon = in_groups(model, process_group=dist.group.WORLD, bucket_cap_mb=0.004)
    run(model, muon, range(1))
    gathered = []
    all_gather = dist.all_gather_single

    def counted(*args: object, **options: object) -> object:
        gathered.append(args)
        return all_gather(*args, **options)

    dist.all_gather_single = counted
    with FlopCounterMode(display=False) as here:
        run(model, muon, range(1, 2))
    dist.all_gather_single = all_gather
    plan = muon.teams()[0][0].exchange.plan
    assert len(gathered) == len(plan.buckets) > 1
    flops: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(flops, here.get_total_flops())
    assert flops == plan.loads


DIFFERENT = (
    {"ns_dtype": "bfloat16"},
    {"ns_steps": 3},
    {"ns_coefficients": (2.0, -1.5, 0.5)},
    {"bucket_cap_mb": 0.001},
    {"momentum": 0.9},
    {"weight_decay": 0.2},
    {"adjust_lr_fn": "none"},
)


def ranks_that_differ(directory: Path) -> None:
    """A rank with other groups, or that would work in another dtype, hangs nobody."""
    for other in DIFFERENT:
        model = sharded()
        muon = in_groups(
            model, **{"ns_dtype": "float32", **(other if dist.get_rank() == 1 else {})}
        )
        set_gradients(model, 0)
        before = [p.to_local().clone() for p in muon.param_groups[0]["params"]]
        with pytest.raises(RuntimeError, match=r"ranks that agree: \[\[0, 2\], \[1\]\]"):
            muon.step()
        after = [p.to_local() for p in muon.param_groups[0]["params"]]
        assert all(map(torch.equal, before, after))


def ranks_with_another_order_or_rate(directory: Path) -> None:
    """Matrices of one shape, so that the plans are alike."""
    here = dist.get_rank() == 1
    for name in ("in another order", "with another rate", "in common"):
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
        shared = name == "in common"
        named = list((model if shared else fully_shard(model)).named_parameters())
        if here and name != "with another rate":
            named.reverse()
        lr = torch.tensor(0.02 if here and name == "with another rate" else 0.01)
        muon = Muon(named, lr=lr, process_group=dist.group.WORLD if shared else None)
        set_gradients(model, 0)
        with pytest.raises(RuntimeError, match=r"ranks that agree: \[\[0, 2\], \[1\]\]"):
            muon.step()


def ranks_may_write_options_in_another_way(directory: Path) -> None:
    here = dist.get_rank() == 1
    model = fully_shard(nn.Linear(6, 8))
    options = {"lr": torch.tensor(0.5) if here else 0.5, "split": [2, 6] if here else (2, 6)}
    muon = Muon([{"params": [model.weight], "weight_decay": 0 if here else 0.0, **options}])
    run(model, muon, range(2))


def a_rank_alone_may_load_and_describe(directory: Path) -> None:
    """Neither makes it talk to the others, which do not."""
    model, reference = sharded(layers=SMALL), Parts(layers=SMALL)
    muon, other = in_groups(model), in_groups(reference)
    for step in range(3):
        if step == 1 and dist.get_rank() == 1:
            muon.load_state_dict(muon.state_dict())
            muon.describe_parameters()
        for group in (*muon.param_groups, *other.param_groups):
            group["lr"] *= 0.5
        run(model, muon, range(step, step + 1))
        run(reference, other, range(step, step + 1))
    assert_same(model, reference)


def owners_without_a_gradient_do_not_compute(directory: Path) -> None:
    """No rank has one; of those with their own copies each knows for itself."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    muon = Muon(model.parameters(), process_group=dist.group.WORLD)
    run(model, muon, range(1))
    set_gradients(model, 1)
    model[1].weight.grad = None
    plan = muon.teams()[0][0].exchange.plan
    with FlopCounterMode(display=False) as here:
        muon.step()
    assert here.get_total_flops() == (plan.costs[0] if plan.owners[0] == dist.get_rank() else 0)


def bytes_are_as_the_formula_says(directory: Path) -> None:
    """Of P bytes of matrices a rank sends (P / W) (W - 1) / W to the owners, and as much back."""
    ranks = dist.get_world_size()
    for dtype, options in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2 * ranks)))
        muon = Muon(fully_shard(model).parameters(), ns_dtype=options)
        run(model, muon, range(1))
        with exchanges() as exchanged:
            run(model, muon, range(1, 2))
        (team,), _ = muon.teams()
        assert len(exchanged) == 2 * len(team.exchange.plan.buckets)
        sent = sum((len(source) - kept) * source.itemsize for source, kept in exchanged)
        whole = 2 * ranks * 8 * 8 * dtype.itemsize
        assert sent == 2 * (whole // ranks) * (ranks - 1) // ranks


def hybrid_gathers_nothing(directory: Path) -> None:
    """Each copy of the model exchanges among its own ranks, and no rank sees a whole parameter."""
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
    )
    model = sharded(mesh=mesh)
    muon = in_groups(model)
    run(model, muon, range(1))
    set_gradients(model, 1)
    with CommDebugMode() as collectives:
        muon.step()
    (team,), others = muon.teams()
    assert not others
    counts = {str(operation): n for operation, n in collectives.get_comm_counts().items() if n}
    assert counts == {"c10d.alltoall_base_": 2 * len(team.exchange.plan.buckets)}
    assert team.exchange.group == mesh.get_group("shard")

"""Scenarios of real ranks: what happens around the optimizer while a model trains."""

import warnings
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from muon_model import SMALL, Parts, assert_same, in_groups, run, set_gradients, sharded, whole
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from core_plugin_muon import Muon


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 16))


def overflow_on_one_rank(directory: Path) -> None:
    """Where the part of one rank alone overflows, no rank steps; and all do, once none does."""
    model, reference = sharded(layers=SMALL), Parts(layers=SMALL)
    muon, other = in_groups(model), in_groups(reference)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    scaler.scale(torch.zeros(()))
    for step in range(3):
        set_gradients(model, step)
        set_gradients(reference, step)
        for p in model.parameters():
            p.grad.mul_(scaler.get_scale())
        if step == 1 and dist.get_rank() == 1:
            model.layers[0].weight.grad.to_local()[0, 0] = torch.inf
        before = [p.to_local().clone() for p in model.parameters()]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found a non-scalar tensor")  # torch's own handler
            scaler.step(muon)
        stayed = all(map(torch.equal, before, (p.to_local() for p in model.parameters())))
        assert stayed == (step == 1)
        scaler.update()
        if step != 1:
            other.step()
    assert scaler.get_scale() == 2.0
    assert_same(model, reference)


def groups_come_and_go(directory: Path) -> None:
    """Parameters added between steps, and ones whose gradients begin and end to be wanted."""

    def train(model: nn.Sequential) -> None:
        first, last = model[0], model[2]
        optimizer = Muon([{"params": [first.weight]}])
        first.weight.requires_grad_(False)
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": [last.weight], "ns_steps": 3})
                optimizer.add_param_group({"params": [first.bias], "algorithm": "adamw"})
            set_gradients(model, step)
            first.weight.requires_grad_(step % 3 > 0)
            if step % 3 == 0:
                first.weight.grad = None
            optimizer.step()

    reference = network()
    train(reference)
    for model in (fully_shard(network()), network()):
        train(model)
        assert_same(model, reference)


def parameters_are_swapped(directory: Path) -> None:
    """Sharding after the optimizer was made, and giving it the new parameters, as launchers do."""
    model, reference = network(), network()
    muon, other = Muon.for_model(model), Muon.for_model(reference)
    originals = [weakref.ref(p) for p in model.parameters()]
    fully_shard(model)
    named = dict(model.named_parameters())
    for group in muon.param_groups:
        group["params"] = [named[name] for name in group["param_names"]]
    assert not any(original() is not None for original in originals), "whole ones are kept"
    run(model, muon, range(3))
    run(reference, other, range(3))
    assert_same(model, reference)
    assert muon.describe_parameters(2) == other.describe_parameters(2)


def fewer_matrices_than_ranks(directory: Path) -> None:
    """Ranks that own nothing, and hold nothing, take part all the same."""

    def tiny() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(5, 2)

    reference = tiny()
    run(reference, Muon([reference.weight]), range(3))
    common, split = tiny(), fully_shard(tiny())
    run(common, Muon([common.weight], process_group=dist.group.WORLD), range(3))
    run(split, Muon([split.weight]), range(3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for shape in ((0, 3, 4), (2, 0, 4)):
        stack = nn.Module()
        stack.experts = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [Shard(0)]))
        run(stack, Muon([{"params": [stack.experts], "flatten": False}]), range(2))
    assert torch.equal(common.weight, reference.weight)
    assert torch.equal(whole(split.weight), reference.weight)


def compiled(directory: Path) -> None:
    """A sharded model that is compiled trains as it does otherwise."""

    def train(model: nn.Module, optimizer: Muon) -> None:
        inputs = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    plain, model = fully_shard(network()), fully_shard(network())
    for called in (plain, torch.compile(model, backend="aot_eager")):
        train(called, Muon.for_model(called))
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())


def clipped_and_scheduled(directory: Path) -> None:
    def train(model: nn.Module) -> None:
        optimizer = Muon.for_model(model, lr=torch.tensor(0.02))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [0.02, 0.01], total_steps=5, cycle_momentum=False
        )
        for step in range(4):
            set_gradients(model, step)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=False)

    model, reference = fully_shard(network()), network()
    train(model)
    train(reference)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q, rtol=0, atol=1e-6)  # norms add up differently


def adamw(directory: Path) -> None:
    """The half that is AdamW is torch's within rounding, and sharded bit for bit as it is whole."""
    options = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}

    def train(model: nn.Module) -> nn.Module:
        groups = [{"params": model.parameters(), "algorithm": "adamw", **options}]
        run(model, Muon(groups), range(4))
        return model

    ours, alone, theirs = sharded(layers=SMALL), Parts(layers=SMALL), Parts(layers=SMALL)
    assert_same(train(ours), train(alone))
    run(theirs, torch.optim.AdamW(theirs.parameters(), **options), range(4))
    for p, q in zip(alone.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def dtypes(directory: Path) -> None:
    """Parameters of three dtypes in one optimizer; each keeps its own."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        sizes = ((65, 48), (48, 65), (3, 7))  # tall, wide, and of no number of vectors
        layers = [nn.Linear(i, o, bias=False, dtype=dtype) for dtype in formats for o, i in sizes]
        return nn.ModuleList(layers)

    formats = (torch.float32, torch.bfloat16, torch.float16)
    for ns_dtype in ("float32", "bfloat16"):
        reference, model = build(), build()
        for layer in model:
            fully_shard(layer)
        for each in (reference, model):
            run(each, Muon(each.parameters(), ns_dtype=ns_dtype), range(3))
        assert [p.dtype for p in model.parameters()] == [d for d in formats for _ in range(3)]
        assert_same(model, reference)


def gradients_on_some_ranks(directory: Path) -> None:
    """Under hybrid sharding and in common, too, a rank without a gradient stops no other."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    split, common = fully_shard(network(), mesh=mesh), network()
    for model, options in ((split, {}), (common, {"process_group": dist.group.WORLD})):
        muon = Muon([model[0].weight, model[2].weight], **options)
        set_gradients(model, 0)
        if rank == 0:
            model[0].weight.grad = None
        if rank != 1:
            model[2].weight.grad = None
        before = [local(p).clone() for p in (model[0].weight, model[2].weight)]
        muon.step()
        after = [local(p) for p in (model[0].weight, model[2].weight)]
        stayed = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert stayed == [rank == 0, rank != 1]
        buffers = [muon.state[p]["momentum_buffer"] for p in (model[0].weight, model[2].weight)]
        assert [not local(b).any() for b in buffers] == stayed


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

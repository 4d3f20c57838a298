"""Scenarios of real ranks: what one layout saved, every other one goes on with."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from muon_model import SMALL, Parts, assert_same, in_groups, run, set_gradients, sharded, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from core_plugin_muon import Muon
from core_plugin_muon.options import Rule

Made = tuple[nn.Module, Muon]


def of_fsdp2(seed: int) -> Made:
    model = sharded(seed, layers=SMALL)
    return model, in_groups(model)


def of_hybrid(seed: int) -> Made:
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
    )
    model = sharded(seed, mesh, SMALL)
    return model, in_groups(model)


def of_ddp(seed: int) -> Made:
    model = DistributedDataParallel(Parts(seed, SMALL))
    return model, in_groups(model.module, process_group=dist.group.WORLD)


LAYOUTS: dict[str, Callable[[int], Made]] = {"fsdp2": of_fsdp2, "ddp": of_ddp, "hybrid": of_hybrid}


PAIRS = {
    1: [("fsdp2", "fsdp2"), ("ddp", "ddp"), ("hybrid", "fsdp2")],
    2: [("fsdp2", "ddp"), ("ddp", "fsdp2"), ("hybrid", "fsdp2")],
    4: [("fsdp2", "hybrid"), ("ddp", "fsdp2"), ("hybrid", "hybrid"), ("hybrid", "ddp")],
}
"""For each number of ranks, which layout goes on from the checkpoint of which."""


def save(directory: Path) -> None:
    for name in ("hybrid",) if dist.get_world_size() == 4 else ("fsdp2", "ddp"):
        model, muon = LAYOUTS[name](0)
        run(model, muon, range(3))
        states = get_state_dict(model, muon)
        momentum = states[1]["state"]["layers.0.weight"]["momentum_buffer"]
        assert not isinstance(momentum, DTensor) or momentum.placements[-1] == Shard(0)
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=directory / name)


def resume(directory: Path) -> None:
    """In a new process the run goes on as one process would have, with its momentum."""
    reference = Parts(layers=SMALL)
    other = in_groups(reference)
    run(reference, other, range(3))
    saved = [{k: v.clone() for k, v in other.state[p].items()} for p in reference.parameters()]
    run(reference, other, range(3, 5))
    for wrote, goes_on in PAIRS[dist.get_world_size()]:
        model, muon = LAYOUTS[goes_on](1)
        load(model, muon, directory / wrote)
        for p, state in zip(model.parameters(), saved, strict=True):
            assert muon.state[p].keys() == state.keys()
            for key, value in muon.state[p].items():
                assert torch.equal(whole(value), state[key]), (wrote, goes_on, key)
        run(model, muon, range(3, 5))
        assert_same(model, reference)


def load(model: nn.Module, muon: Muon, checkpoint: Path) -> None:
    assert not muon.state, "torch would take any state for all of it, and restore nothing"
    before = [whole(p).clone() for p in model.parameters()]
    states = get_state_dict(model, muon)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(whole(p), old), "making a template must not train"
    loaded = {"model": states[0], "optimizer": states[1]}
    dcp.load(loaded, checkpoint_id=checkpoint)
    set_state_dict(
        model, muon, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )


class Stack(nn.Module):
    """Matrices that are large enough for torch's Muon to shard, and vectors."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(12, 16), nn.Linear(16, 8), nn.Linear(8, 8)])

    def ours(self, **options: object) -> Muon:
        matrices, vectors = self.halves()
        groups = [{"params": vectors, "algorithm": "adamw"}, {"params": matrices}]
        return Muon(groups, ns_dtype="bfloat16", **options)

    def theirs(self, **options: object) -> list[torch.optim.Optimizer]:
        matrices, vectors = self.halves()
        return [torch.optim.Muon(matrices, **options), torch.optim.AdamW(vectors)]

    def halves(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        parameters = list(self.parameters())
        return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim == 1]


def step_all(model: nn.Module, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    set_gradients(model, step)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def go_on(
    model: Stack, optimizers: list[torch.optim.Optimizer], *others: tuple[Stack, list]
) -> None:
    """Give others the parameters and the optimizers' state, by name."""
    states = get_state_dict(model, optimizers)
    for other, theirs in others:
        sharded = any(isinstance(p, DTensor) for p in other.parameters())
        own, state = copy.deepcopy(states if sharded else tree_map(whole, states))
        set_state_dict(other, theirs, model_state_dict=own, optim_state_dict=state)


def assert_alike(ours: Stack, torchs: Stack) -> None:
    """Bit for bit what Muon steps, and within rounding what AdamW does."""
    for p, q in zip(ours.parameters(), torchs.parameters(), strict=True):
        atol = 0 if p.ndim == 2 else 1e-6
        torch.testing.assert_close(whole(p), q, rtol=0, atol=atol)


def torch_to_ours(directory: Path) -> None:
    """Ours goes on, sharded, where torch's two sharded optimizers were, as they would in one."""
    model, twin, once = fully_shard(Stack()), fully_shard(Stack(1)), Stack(2)
    theirs, ours, reference = model.theirs(lr=0.02, momentum=0.9), twin.ours(), once.theirs()
    step_all(model, theirs, 0)
    go_on(model, theirs, (twin, [ours]), (once, reference))
    for step in (1, 2):
        step_all(twin, [ours], step)
        step_all(once, reference, step)
        assert_alike(twin, once)


def ours_to_torch(directory: Path) -> None:
    """Torch's two optimizers go on where ours was, sharded; in one process as ours would."""
    model, twin, once = fully_shard(Stack()), fully_shard(Stack(1)), Stack(2)
    ours, theirs, reference = model.ours(lr=0.02, momentum=0.9), twin.theirs(), once.theirs()
    step_all(model, [ours], 0)
    go_on(model, [ours], (twin, theirs), (once, reference))
    for step in (1, 2):
        for each, optimizers in ((model, [ours]), (twin, theirs), (once, reference)):
            step_all(each, optimizers, step)
        assert_alike(model, once)
    # Sharded, torch adds up products of bfloat16 in another order.
    for p, q in zip(twin.parameters(), once.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q, rtol=0, atol=2e-3)


def skipped(directory: Path) -> None:
    """A parameter of no algorithm has nothing to save, and hinders neither saving nor loading."""

    def make(seed: int) -> Made:
        model = fully_shard(Stack(seed))
        return model, Muon.for_model(model, [Rule("layers.1.weight", "skip")])

    model, muon = make(0)
    step_all(model, [muon], 0)
    states = get_state_dict(model, muon)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=directory / "skipped")
    twin, other = make(1)
    load(twin, other, directory / "skipped")
    assert not other.state[twin.layers[1].weight]
    for each, optimizer in ((model, muon), (twin, other)):
        step_all(each, [optimizer], 1)
    assert torch.equal(whole(model.layers[1].weight), Stack(0).layers[1].weight)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(p), whole(q))

"""The optimizer among what else takes part in training: schedules, scaling, clipping, hooks."""

import copy
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from muon_parameters import assert_same, mixed, parameters, run, set_gradients
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from core_plugin_muon import Muon

Made = tuple[Muon, list[nn.Parameter]]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)
    )


def train(model: nn.Module, optimizer: Muon, steps: int = 3) -> None:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def sequential(optimizer: Muon) -> lr_scheduler.LRScheduler:
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 4)
    return lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[2])


SCHEDULES: list[Callable[[Muon], lr_scheduler.LRScheduler]] = [
    lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, [0.02, 0.001], total_steps=6, cycle_momentum=False
    ),
    lambda optimizer: SWALR(optimizer, swa_lr=[0.01, 0.0005], anneal_epochs=4),
    sequential,
]


def updates_of(made: Made, step: int) -> list[torch.Tensor]:
    optimizer, params = made
    before = [p.detach().clone() for p in params]
    run(optimizer, params, range(step, step + 1))
    return [p.detach() - old for p, old in zip(params, before, strict=True)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_schedules_reach_every_parameter(schedule, as_tensor: bool) -> None:
    """Against twins with a constant rate: each update is as large as the schedule says."""
    scheduled, constant = mixed(weight_decay=0.0), mixed(weight_decay=0.0)
    optimizer, _ = scheduled
    for group in optimizer.param_groups if as_tensor else ():
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
    bases = [float(group["lr"]) for group in optimizer.param_groups]
    scheduler = schedule(optimizer)
    factors = []
    for step in range(4):
        groups = optimizer.param_groups
        by_group = [float(g["lr"]) / base for g, base in zip(groups, bases, strict=True)]
        of_each = [by_group[i] for i, g in enumerate(groups) for _ in g["params"]]
        pairs = zip(updates_of(scheduled, step), updates_of(constant, step), of_each, strict=True)
        for update, reference, factor in pairs:
            torch.testing.assert_close(update, reference * factor, rtol=1e-3, atol=2e-6)
        factors.append(by_group)
        scheduler.step()
    assert all(len(set(of_group)) > 1 for of_group in zip(*factors, strict=True))


def test_one_cycle_may_not_cycle_two_momenta() -> None:
    """Muon has `momentum` and AdamW `betas`; torch's schedule knows one of them."""
    with pytest.raises(ValueError, match="cycle_momentum"):
        lr_scheduler.OneCycleLR(mixed()[0], 0.02, total_steps=6)


def test_a_schedule_goes_on_after_loading() -> None:
    first, second = mixed(), mixed(seed=1)
    schedules = [SCHEDULES[2](optimizer) for optimizer, _ in (first, second)]
    for step in range(2):
        run(*first, range(step, step + 1))
        schedules[0].step()
    second[0].load_state_dict(copy.deepcopy(first[0].state_dict()))
    schedules[1].load_state_dict(schedules[0].state_dict())
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer, _ in (first, second)]
    assert rates[0] == rates[1] != [0.02, 0.001]


def test_the_learning_rate_may_be_a_tensor_that_changes() -> None:
    (ours, params), (plain, others) = mixed(), mixed()
    rate = torch.tensor(0.25)
    for group in ours.param_groups:
        group["lr"] = rate
    for value in (0.25, 0.125):
        rate.fill_(value)
        for group in plain.param_groups:
            group["lr"] = value
        run(ours, params, range(1))
        run(plain, others, range(1))
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)
    count = len(ours.param_groups[0]["params"])
    assert_same(params[:count], others[:count])


def test_a_scaler_skips_what_overflows_and_unscales_the_rest() -> None:
    (scaled, params), (plain, others) = mixed(), mixed()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.zeros(()))
    for step in range(4):
        set_gradients(params, step)
        set_gradients(others, step)
        for p in params:
            p.grad *= scaler.get_scale()
        if step == 2:
            params[1].grad[0, 0] = torch.inf
        before = [p.detach().clone() for p in params]
        scaler.unscale_(scaled)
        scaler.step(scaled)
        scaler.update()
        if step == 2:
            assert_same(params, before)
        else:
            plain.step()
    assert scaler.get_scale() == 2.0**9
    assert_same(params, others)


def test_clipped_gradients_are_what_is_stepped_with() -> None:
    """Clipping all gradients alike changes no direction of Muon's first step, and AdamW's not."""
    (clipped, params), (plain, others) = (mixed(ns_dtype="float32") for _ in range(2))
    set_gradients(params, 0)
    set_gradients(others, 0)
    assert nn.utils.clip_grad_norm_(params, 0.01) > 1
    clipped.step()
    plain.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)
    buffer = clipped.state[params[0]]["momentum_buffer"]
    torch.testing.assert_close(buffer, params[0].grad * 0.05)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_trains_as_it_does_otherwise(backend: str) -> None:
    plain, model = network(), network()
    compiled = torch.compile(model, backend=backend)
    optimizer = Muon.for_model(compiled)
    assert list(optimizer.reasons) == [name for name, _ in plain.named_parameters()]
    train(compiled, optimizer)
    train(plain, Muon.for_model(plain))
    assert_same([*model.parameters()], [*plain.parameters()])


def test_a_step_may_be_compiled() -> None:
    (ours, params), (plain, others) = mixed(), mixed()
    step = torch.compile(lambda: ours.step(), backend="eager")
    for number in range(3):
        set_gradients(params, number)
        step()
    run(plain, others, range(3))
    assert_same(params, others)


def test_an_averaged_model_follows() -> None:
    model = network()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = Muon.for_model(model)
    expected = [p.detach().clone() for p in model.parameters()]
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    for step in range(3):
        train(model, optimizer, 1)
        for mean, p in zip(expected, model.parameters(), strict=True):
            mean.lerp_(p.detach(), 0.5 if step else 1.0)
    for mean, p in zip(expected, average.module.parameters(), strict=True):
        torch.testing.assert_close(mean, p)


def test_what_a_hook_does_after_a_step_stays() -> None:
    """The place for clipping queries and keys, which needs what attention has measured."""
    model = network()
    optimizer = Muon.for_model(model)
    seen = []

    def halve(stepped: Muon, args: tuple, kwargs: dict) -> None:
        seen.append(model[0].weight.detach().clone())
        with torch.no_grad():
            model[0].weight[:8] *= 0.5

    optimizer.register_step_post_hook(halve)
    train(model, optimizer, 1)
    assert torch.equal(model[0].weight[:8], seen[0][:8] * 0.5)
    assert torch.equal(model[0].weight[8:], seen[0][8:])


def test_gradients_may_be_zeroed_in_place() -> None:
    models = network(), network()
    for model, to_none in zip(models, (True, False), strict=True):
        optimizer = Muon.for_model(model)
        for _ in range(3):
            model(torch.ones(2, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    assert_same(*([*model.parameters()] for model in models))


def test_parameters_may_be_swapped_for_others() -> None:
    """As accelerate does when it shards or moves a model: the group says what they are."""
    (ours, params), (plain, others) = mixed(), mixed()
    run(ours, params, range(1))
    fresh = [nn.Parameter(p.detach().clone()) for p in others]
    position = 0
    for group in ours.param_groups:
        group["params"] = fresh[position : position + len(group["params"])]
        position += len(group["params"])
    ours.state.clear()
    run(ours, fresh, range(3))
    run(plain, others, range(3))
    assert_same(fresh, others)


def test_memory_of_parameters_may_be_moved() -> None:
    (ours, params), (plain, others) = mixed(), mixed()
    for step in range(3):
        for p in params:
            p.data = p.data.clone()
        run(ours, params, range(step, step + 1))
    run(plain, others, range(3))
    assert_same(params, others)


def test_a_parameter_may_be_frozen_for_a_while() -> None:
    (ours, params), (plain, others) = mixed(), mixed()
    run(ours, params, range(1))
    params[0].requires_grad_(False).grad = None
    frozen = params[0].detach().clone()
    ours.step()
    assert torch.equal(params[0], frozen)
    params[0].requires_grad_(True)
    run(ours, params, range(2, 3))
    run(plain, others, range(1))
    others[0].grad = None
    plain.step()
    run(plain, others, range(2, 3))
    assert_same(params, others)


def test_groups_may_be_added_between_steps() -> None:
    params = parameters()
    optimizer = Muon(params[:2])
    run(optimizer, params, range(1))
    optimizer.add_param_group({"params": params[2:], "lr": 0.25})
    old, new = parameters(), parameters()
    run(Muon(old[:2]), old, range(2))
    run(optimizer, params, range(1, 2))
    run(Muon(new[2:], lr=0.25), new, range(1, 2))
    assert_same(params, old[:2] + new[2:])


def test_neither_triton_nor_numpy_is_needed() -> None:
    script = """
import sys

for absent in ("triton", "numpy", "core_plugin"):
    sys.modules[absent] = None
import core_plugin_muon
assert "torch" not in sys.modules
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = core_plugin_muon.Muon.for_model(model)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
assert optimizer.state
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)

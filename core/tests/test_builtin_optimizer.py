import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from core_plugin import ConfigError
from core_plugin.types import OptimizerPlugin

CASES = [
    ("adamw", {"lr": 0.05, "betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.3}),
    ("sgd", {"lr": 0.05}),
    ("sgd", {"lr": 0.05, "momentum": 0.7, "nesterov": True, "weight_decay": 0.3}),
]


def make(name, model, **config):
    route = OptimizerPlugin(name)
    return route(model, route.parse_params(config, route.params_type()))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(model, optimizer, steps=5):
    """Train, and return each step's gradients, by name."""
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1 + step, 15).view(5, 3)
        model(x).square().sum().backward()
        history.append({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    return history


def adamw_by_hand(value, gradients, decay, *, lr, betas, eps, **_):
    mean, square = torch.zeros_like(value), torch.zeros_like(value)
    for step, gradient in enumerate(gradients, start=1):
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient**2
        corrected = square / (1 - betas[1] ** step)
        value = value - lr * decay * value
        value = value - lr * mean / (1 - betas[0] ** step) / (corrected.sqrt() + eps)
    return value


def sgd_by_hand(value, gradients, decay, *, lr, momentum=0.0, **_):
    total = torch.zeros_like(value)
    for gradient in gradients:
        decayed = gradient + decay * value
        total = momentum * total + decayed
        value = value - lr * (decayed + momentum * total if momentum else total)
    return value


@pytest.mark.parametrize(("name", "config"), CASES)
def test_steps_are_those_of_the_formula_and_only_matrices_decay(name, config):
    model = make_model()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    history = train(model, make(name, model, **config))
    by_hand = {"adamw": adamw_by_hand, "sgd": sgd_by_hand}[name]
    for parameter_name, parameter in model.named_parameters():
        decay = config.get("weight_decay", 0.0) if parameter.ndim >= 2 else 0.0
        gradients = [step[parameter_name] for step in history]
        expected = by_hand(start[parameter_name], gradients, decay, **config)
        torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_it_holds_each_trained_parameter_once_and_no_other(name):
    model = make_model()
    model.append(model[0])
    model[2].weight.requires_grad_(False)
    groups = make(name, model).param_groups
    held = [p for group in groups for p in group["params"]]
    expected = {model[0].weight, model[0].bias, model[2].bias}
    assert len(held) == len(expected)
    assert set(held) == expected


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_model_that_is_all_frozen_is_refused(name):
    with pytest.raises(ConfigError, match="no parameter that is trained"):
        make(name, make_model().requires_grad_(False))


@pytest.mark.parametrize("kept_whole", [0, 1], ids=["all sharded", "some kept whole"])
@pytest.mark.parametrize(("name", "config"), CASES)
def test_sharded_parameters_train_as_whole_ones(name, config, kept_whole, one_process_group):
    whole = make_model()
    sharded = copy.deepcopy(whole)
    ignored = set(list(sharded.parameters())[:kept_whole])
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)), ignored_params=ignored)
    train(whole, make(name, whole, **config))
    train(sharded, make(name, sharded, **config))
    kinds = [isinstance(p, DTensor) for p in sharded.parameters()]
    assert kinds == [n >= kept_whole for n in range(4)]
    for mine, other in zip(sharded.parameters(), whole.parameters(), strict=True):
        value = mine.full_tensor() if isinstance(mine, DTensor) else mine
        torch.testing.assert_close(value, other)


@pytest.fixture
def one_process_group():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("name", "config"), CASES)
def test_a_resumed_optimizer_continues_exactly(name, config):
    model = make_model()
    optimizer = make(name, model, **config)
    train(model, optimizer)
    resumed = copy.deepcopy(model)
    other = make(name, resumed, **config)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer)
    train(resumed, other)
    for mine, theirs in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("adamw", {"lr": 0}, "lr must be above 0, got 0"),
        ("adamw", {"lr": float("nan")}, "lr must be above 0, got nan"),
        ("adamw", {"betas": [0.9, 1.0]}, r"betas must be in \[0, 1\), got 0.9 and 1.0"),
        ("adamw", {"eps": 0}, "eps must be above 0, got 0"),
        ("adamw", {"weight_decay": -1}, "weight_decay must be at least 0, got -1"),
        ("adamw", {"lr": -1, "eps": -2}, r"lr .* got -1.*\n.*eps .* got -2"),
        ("sgd", {"lr": -0.1}, "lr must be above 0, got -0.1"),
        ("sgd", {"momentum": 1}, r"momentum must be in \[0, 1\), got 1"),
        ("sgd", {"nesterov": True}, "nesterov needs a momentum above 0"),
        ("sgd", {"weight_decay": -1}, "weight_decay must be at least 0, got -1"),
    ],
)
def test_parameters_out_of_range_are_named(name, config, message):
    with pytest.raises(ConfigError, match=message):
        make(name, make_model(), **config)

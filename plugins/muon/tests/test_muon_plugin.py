"""The entry point."""

import subprocess
import sys
import typing
from importlib.metadata import EntryPoint

import pytest
import torch
from torch import nn

from core_plugin_muon import Muon
from core_plugin_muon.plugin import Params, muon


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 20))


def test_importing_the_entry_point_does_not_import_torch() -> None:
    code = (
        "import sys, core_plugin_muon, core_plugin_muon.plugin as plugin;"
        "plugin.Params(); core_plugin_muon.__version__;"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_optimizer_is_found_without_the_trainer() -> None:
    code = (
        "import sys; from core_plugin_muon import Muon, route;"
        "sys.exit('core_plugin' in sys.modules or Muon.__name__ != 'Muon')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_has_nothing_else() -> None:
    import core_plugin_muon

    assert {"Muon", "route", "__version__"} <= set(dir(core_plugin_muon))
    with pytest.raises(AttributeError, match="has no attribute 'Adam'"):
        _ = core_plugin_muon.Adam


def test_the_entry_point_leads_to_the_function_and_its_parameters() -> None:
    entry = EntryPoint("muon", "core_plugin_muon.plugin:muon", "core_plugin.optimizer")
    assert entry.load() is muon
    assert muon.__annotations__["params"] is Params
    assert typing.get_type_hints(Params)["lr"] is float


def test_groups_follow_the_parameters() -> None:
    params = Params(lr=0.01, weight_decay=0.2, momentum=0.9, adamw_betas=(0.8, 0.9), ns_steps=3)
    optimizer = muon(model(), params)
    assert isinstance(optimizer, Muon)
    matrices, rest = optimizer.param_groups
    assert matrices["param_names"] == ["1.weight"]
    assert rest["param_names"] == ["0.weight", "1.bias", "3.weight", "3.bias"]
    assert (matrices["lr"], rest["lr"]) == (0.01, 0.01)
    assert (matrices["weight_decay"], rest["weight_decay"]) == (0.2, 0.2)
    assert (matrices["momentum"], matrices["ns_steps"], rest["betas"]) == (0.9, 3, (0.8, 0.9))


def test_adamw_may_differ_from_muon() -> None:
    optimizer = muon(model(), Params(adamw_lr=0.0, adamw_weight_decay=0.0, adamw_eps=1e-6))
    rest = optimizer.param_groups[1]
    assert (rest["lr"], rest["weight_decay"], rest["eps"]) == (0.0, 0.0, 1e-6)


def test_a_model_of_hidden_matrices_alone_has_one_group() -> None:
    optimizer = muon(nn.Linear(4, 4, bias=False), Params())
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", -0.1),
        ("weight_decay", float("inf")),
        ("momentum", 1.5),
        ("ns_steps", 0),
        ("scale", "other"),
        ("adamw_lr", -1.0),
        ("adamw_betas", (0.9, 1.2)),
        ("adamw_eps", 0.0),
        ("adamw_weight_decay", -1.0),
        ("dtype", "float64"),
    ],
)
def test_values_out_of_range_name_the_field_and_the_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be ") as error:
        Params(**{field: value})
    assert repr(value) in str(error.value)


def test_only_the_fields_with_a_fallback_may_be_null() -> None:
    with pytest.raises(ValueError, match=r"^lr must be "):
        Params(lr=None)
    assert Params(adamw_lr=None, adamw_weight_decay=None) == Params()


def test_training_with_the_defaults_learns() -> None:
    torch.manual_seed(0)
    net = model()
    optimizer = muon(net, Params())
    tokens = torch.arange(20)
    losses = []
    for _ in range(150):
        loss = nn.functional.cross_entropy(net(tokens), (tokens + 1) % 20)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]

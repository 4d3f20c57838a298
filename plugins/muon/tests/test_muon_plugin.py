"""The entry point."""

import logging
import subprocess
import sys
import typing
from importlib.metadata import EntryPoint

import pytest
import torch
from torch import nn

from core_plugin_muon import Muon
from core_plugin_muon.coefficients import SETS
from core_plugin_muon.options import Rule
from core_plugin_muon.plugin import Coefficients, Params, muon


def model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(20, 4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 20)
    )


def test_importing_the_entry_point_does_not_import_torch() -> None:
    code = (
        "import sys, core_plugin_muon, core_plugin_muon.plugin as plugin;"
        "plugin.Params(ns_coefficients='cans'); core_plugin_muon.__version__;"
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

    assert {"Muon", "Rule", "format_report", "route", "__version__"} <= set(dir(core_plugin_muon))
    with pytest.raises(AttributeError, match="has no attribute 'Adam'"):
        _ = core_plugin_muon.Adam


def test_the_entry_point_leads_to_the_function_and_its_parameters() -> None:
    entry = EntryPoint("muon", "core_plugin_muon.plugin:muon", "core_plugin.optimizer")
    assert entry.load() is muon
    assert muon.__annotations__["params"] is Params
    hints = typing.get_type_hints(Params)
    assert hints["lr"] is float
    assert hints["rules"] == tuple[Rule, ...]


def test_every_field_is_documented() -> None:
    described = Params.__doc__.partition("Attributes:")[2]
    for field in vars(Params()):
        assert f"        {field}: " in described


def test_the_coefficients_that_can_be_named_are_those_there_are() -> None:
    assert typing.get_args(Coefficients) == tuple(SETS)


def test_groups_follow_the_parameters() -> None:
    params = Params(
        lr=0.01,
        weight_decay=0.2,
        momentum=0.9,
        nesterov=False,
        ns_coefficients="cans",
        ns_steps=3,
        adjust_lr_fn="original",
        ns_dtype="bfloat16",
        adamw_betas=(0.8, 0.9),
    )
    optimizer = muon(model(), params)
    assert isinstance(optimizer, Muon)
    matrices, rest = optimizer.param_groups
    assert matrices["param_names"] == ["1.weight", "3.weight"]
    assert rest["param_names"] == ["0.weight", "1.bias", "3.bias", "4.weight", "4.bias"]
    assert (matrices["lr"], rest["lr"]) == (0.01, 0.01)
    assert (matrices["weight_decay"], rest["weight_decay"]) == (0.2, 0.2)
    assert (matrices["momentum"], matrices["ns_steps"], rest["betas"]) == (0.9, 3, (0.8, 0.9))
    assert tuple(matrices["ns_coefficients"]) == SETS["cans"][:3]
    assert matrices["nesterov"] is False
    assert (matrices["adjust_lr_fn"], matrices["ns_dtype"]) == ("original", "bfloat16")


def test_adamw_may_differ_from_muon() -> None:
    optimizer = muon(model(), Params(adamw_lr=0.0, adamw_weight_decay=0.0, adamw_eps=1e-6))
    matrices, rest = optimizer.param_groups
    assert (rest["lr"], rest["weight_decay"], rest["eps"]) == (0.0, 0.0, 1e-6)
    assert (matrices["lr"], matrices["weight_decay"], matrices["eps"]) == (3e-3, 0.1, 1e-7)


def test_rules_make_groups() -> None:
    rules = (
        Rule("0", "skip"),
        Rule("1.weight", "muon", split=(4, 4)),
        Rule("3.weight", "adamw"),
        Rule("4.weight", "muon"),
    )
    groups = muon(model(), Params(rules=rules)).param_groups
    found = {
        name: (group["algorithm"], group.get("split"))
        for group in groups
        for name in group["param_names"]
    }
    assert found == {
        "0.weight": ("skip", None),
        "1.weight": ("muon", (4, 4)),
        "1.bias": ("adamw", None),
        "3.weight": ("adamw", None),
        "3.bias": ("adamw", None),
        "4.weight": ("muon", ()),
        "4.bias": ("adamw", None),
    }


def test_a_model_of_hidden_matrices_alone_has_one_group() -> None:
    optimizer = muon(nn.Linear(4, 4, bias=False), Params())
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon"]


def test_what_becomes_of_the_parameters_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="core_plugin_muon"):
        muon(model(), Params())
    for expected in ("4.weight", "output head", "muon: 2 tensors, 64 parameters", "GFLOP a step"):
        assert expected in caplog.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", -0.1),
        ("weight_decay", float("inf")),
        ("momentum", 1.5),
        ("nesterov", 1),
        ("ns_steps", 0),
        ("adjust_lr_fn", "other"),
        ("ns_dtype", "float64"),
        ("bucket_cap_mb", 0),
        ("ns_coefficients", (1.0, float("nan"), 2.0)),
        ("adamw_lr", -1.0),
        ("adamw_betas", (0.9, 1.2)),
        ("adamw_eps", -1.0),
        ("adamw_weight_decay", -1.0),
    ],
)
def test_values_out_of_range_name_the_field_and_the_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be ") as error:
        Params(**{field: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("triples", [((1.0, 2.0, 3.0),) * 4, ((1.0, 2.0),) * 5, (1.0, 2.0)])
def test_coefficients_of_another_form_are_refused(triples: object) -> None:
    with pytest.raises(ValueError, match=r"^ns_coefficients "):
        Params(ns_coefficients=triples)


def test_all_values_that_are_out_of_range_are_told_at_once() -> None:
    with pytest.raises(
        ValueError, match=r"^lr must be .*; momentum must be .*; adamw_eps must be "
    ):
        Params(lr=-1.0, momentum=2.0, adamw_eps=-1.0)


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

"""Weighted combinations of adapters, against sums of whole updates and the peft library."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from core_plugin.adapters import (
    add_adapter,
    delete_adapter,
    inject,
    merge,
    save_adapter,
    set_adapter,
)
from core_plugin.adapters.walk import adapters, modules
from core_plugin.errors import ConfigError
from core_plugin.types.peft import PeftPlugin
from core_plugin_lora.combine import add_weighted_adapter
from core_plugin_lora.plugin import LoRA, LoRAParams

TOKENS = torch.tensor([[1, 2, 10, 5, 5, 0], [9, 4, 3, 0, 6, 7]])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 12, 8))
        self.gates = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("eow,bsw,bse->bso", self.up, x, torch.softmax(x @ self.gates.T, -1))


class Model(nn.Module):
    """One of each kind of layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv = nn.Conv1d(8, 6, 3, padding=1)
        self.grouped = nn.Conv1d(6, 8, 1, groups=2)
        self.experts = Experts()
        self.head = nn.Linear(12, 5)
        self.double().eval()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x + self.attention(x, x, x)[0]
        x = torch.tanh(self.grouped(self.conv(x.mT))).mT
        return self.head(torch.tanh(self.experts(x)))


LAYERS = ["tokens", "attention", "conv", "grouped", "head"]
SETTINGS: dict[str, dict[str, Any]] = {
    "first": {
        "target_modules": LAYERS,
        "target_parameters": ["experts.up", "experts.gates"],
        "r": 4,
        "lora_alpha": 6,
        "rank_pattern": {"head": 3},
    },
    "second": {
        "target_modules": ["tokens", "attention", "conv", "head"],
        "target_parameters": ["experts.up"],
        "r": 2,
        "lora_alpha": 5,
        "use_rslora": True,
    },
    "third": {"target_modules": ["grouped", "head"], "r": 2, "alpha_pattern": {"head": 3}},
}
WEIGHTS = {"first": 0.7, "second": -1.3, "third": 2.0}


def adapted(settings: dict[str, dict[str, Any]] = SETTINGS) -> Model:
    """A model with adapters that have random values."""
    model = Model()
    for name, own in settings.items():
        add_adapter(model, LoRA, LoRAParams(**own), name)
    for _, module in modules(model):
        for name in module.adapters:
            for _, _, parameter in module.adapter_parameters(name):
                nn.init.normal_(parameter)
    return model


def updates(model: Model, name: str) -> dict[str, Tensor]:
    """What an adapter changes: whole weights, and what a layer that cannot be merged gives."""
    found = {}
    for path, layer in modules(model):
        if name not in layer.adapters:
            continue
        if layer.merge_fault(name):
            x = torch.eye(6).to(layer.base_layer.weight).unsqueeze(-1)
            layer.activate([name])
            found[path] = (layer(x) - layer.base_layer(x)).detach()
            layer.activate([])
            continue
        tensors = {key: torch.zeros_like(layer.owner.get_parameter(key)) for key in layer.changes}
        with torch.no_grad():
            layer.merge_into(tensors, name)
        found |= {f"{path}.{key}": tensor for key, tensor in tensors.items()}
    return found


def weighted(model: Model, weights: dict[str, float]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for name, weight in weights.items():
        for key, update in updates(model, name).items():
            total[key] = total.get(key, 0) + weight * update
    return total


def assert_close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def combine(model: Model, *args: Any, **kwargs: Any) -> None:
    add_weighted_adapter(model, [*WEIGHTS], [*WEIGHTS.values()], "sum", *args, **kwargs)


# What it computes


@pytest.mark.parametrize("how", [("cat",), ("svd", 8), ("svd", 100)], ids=str)
def test_the_sum_is_exact(how: tuple[Any, ...]) -> None:
    model = adapted()
    expected = weighted(model, WEIGHTS)
    combine(model, *how)
    found = updates(model, "sum")
    assert found.keys() == expected.keys()
    for key, update in found.items():
        assert_close(update, expected[key])


def test_the_best_update_of_a_rank_is_kept() -> None:
    model = adapted()
    expected = weighted(model, WEIGHTS)
    combine(model, "svd", 2)
    found = updates(model, "sum")
    for key in ("head.weight", "experts.base_layer.up", "attention.in_proj_weight"):
        u, s, vh = torch.linalg.svd(expected[key], full_matrices=False)
        best = (u[..., :2] * s[..., None, :2]) @ vh[..., :2, :]
        assert_close(found[key], best)
    assert {path: layer.params["sum"].r for path, layer in modules(model)} == {
        **dict.fromkeys(["tokens", "attention", "conv", "grouped", "head"], 2),
        "experts": 2,
        "experts.base_layer": 2,
    }


def test_without_a_rank_the_largest_is_kept() -> None:
    model = adapted()
    combine(model)
    ranks = {path: layer.params["sum"].r for path, layer in modules(model)}
    assert (ranks["tokens"], ranks["grouped"], ranks["head"]) == (4, 4, 3)


def test_ranks_add_up_where_layers_have_several() -> None:
    model = adapted()
    combine(model, "cat")
    ranks = {path: layer.params["sum"].r for path, layer in modules(model)}
    assert ranks == {
        "tokens": 6,
        "attention": 6,
        "conv": 6,
        "grouped": 6,
        "experts": 4,
        "experts.base_layer": 6,
        "head": 7,
    }
    assert all(layer.params["sum"].scaling == 1 for _, layer in modules(model))


@pytest.mark.parametrize("weights", [[0.5, 2.0], [0.5, -2.0], [-0.5, -2.0], [0.0, 1.0]])
def test_linear_adds_up_the_factors(weights: list[float]) -> None:
    two = {
        "one": {"target_modules": ["head"], "lora_alpha": 4},
        "two": {"target_modules": ["head"]},
    }
    model = adapted(two)
    add_weighted_adapter(model, ["one", "two"], weights, "sum", "linear")
    shares = [weights[0] * 0.5, weights[1] * 2]
    a, b = 0, 0
    for share, name in zip(shares, ("one", "two"), strict=True):
        ((down, up),) = model.head.factors(name)
        a = a + abs(share) ** 0.5 * (1 if share >= 0 else -1) * down
        b = b + abs(share) ** 0.5 * up
    assert_close(updates(model, "sum")["head.weight"], (b @ a).detach())


def test_linear_is_exact_for_one() -> None:
    model = adapted({"one": SETTINGS["first"]})
    expected = weighted(model, {"one": -2.5})
    add_weighted_adapter(model, ["one"], [-2.5], "sum", "linear")
    found = updates(model, "sum")
    for key, update in found.items():
        assert_close(update, expected[key])


def test_biases_are_added_up() -> None:
    own = {"target_modules": ["head"], "lora_bias": True}
    model = adapted({"one": own, "two": {**own, "r": 3}})
    expected = weighted(model, {"one": 0.5, "two": -3})
    add_weighted_adapter(model, ["one", "two"], [0.5, -3], "sum", "cat")
    found = updates(model, "sum")
    assert found.keys() == {"head.weight", "head.bias"}
    for key, update in found.items():
        assert_close(update, expected[key])


def test_dropout_stays_where_all_have_it() -> None:
    one = {"target_modules": ["head"], "lora_dropout": 0.2}
    model = adapted({"one": one, "two": {**one, "lora_dropout": 0.1}, "three": SETTINGS["first"]})
    add_weighted_adapter(model, ["one", "two"], [1, 1], "sum")
    assert adapters(model)["sum"].params.lora_dropout == 0.1
    add_weighted_adapter(model, ["one", "three"], [1, 1], "all")
    assert adapters(model)["all"].params.lora_dropout == 0


def test_low_precision_adapters_are_added_in_more() -> None:
    model = adapted().float()
    expected = weighted(model, WEIGHTS)
    combine(model, "svd", 100)
    for key, update in updates(model, "sum").items():
        torch.testing.assert_close(update, expected[key], rtol=1e-4, atol=1e-4)


# What it leaves


def test_the_new_adapter_is_neither_active_nor_trained() -> None:
    model = Model()
    inject(model, LoRA, LoRAParams(**SETTINGS["third"]), "third")
    before = {name: (p.clone(), p.requires_grad) for name, p in model.named_parameters()}
    expected = model(TOKENS)
    add_weighted_adapter(model, ["third"], [0.5], "sum")
    assert torch.equal(model(TOKENS), expected)
    for name, parameter in model.named_parameters():
        value, trained = before.get(name, (parameter, False))
        assert torch.equal(parameter, value)
        assert parameter.requires_grad == trained
    assert model.head.active == ("third",)
    delete_adapter(model, "sum")
    assert {name for name, _ in model.named_parameters()} == before.keys()


def test_it_is_used_as_any_other() -> None:
    model = adapted()
    combine(model, "cat")
    set_adapter(model, "sum")
    expected = model(TOKENS)
    (expected**2).sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if ".sum." in n)
    delete_adapter(model, "first")
    delete_adapter(model, "second")
    assert_close(model(TOKENS), expected)


# What peft says wrongly of patterns for parameters.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")
@pytest.mark.parametrize("how", [("cat",), ("svd", 3)], ids=str)
def test_it_is_saved_and_loaded(how: tuple[Any, ...], tmp_path: Path) -> None:
    settings = {name: own for name, own in SETTINGS.items() if name != "third"}
    settings = {
        n: {**own, "target_modules": ["tokens", "conv", "head"]} for n, own in settings.items()
    }
    model = adapted(settings).float()
    add_weighted_adapter(model, [*settings], [0.7, -1.3], "sum", *how)
    set_adapter(model, "sum")
    expected = model(TOKENS)
    save_adapter(tmp_path, model, "sum")
    loaded = Model().float()
    PeftPlugin.from_pretrained(loaded, tmp_path)
    torch.testing.assert_close(loaded(TOKENS), expected)
    assert {p: m.params["default"].r for p, m in modules(loaded)} == {
        p: m.params["sum"].r for p, m in modules(model)
    }
    theirs = peft.PeftModel.from_pretrained(Model().float(), tmp_path)
    torch.testing.assert_close(theirs(TOKENS), expected, rtol=1e-5, atol=1e-6)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.inner = nn.ModuleDict({"head": nn.LayerNorm(3)})

    def forward(self, x: Tensor) -> Tensor:
        return self.inner["head"](self.head(x))


def test_layers_are_named_so_that_no_other_is_meant() -> None:
    model = Nested()
    inject(model, LoRA, LoRAParams(target_modules="head"))
    add_weighted_adapter(model, ["default"], [2], "sum")
    # In a list, it would be the end of inner.head too.
    assert adapters(model)["sum"].params.target_modules == "head"
    assert [path for path, m in modules(model) if "sum" in m.adapters] == ["head"]


# Against the peft library


@pytest.mark.parametrize("how", ["cat", "svd", "linear"])
def test_peft_makes_the_same(how: str, tmp_path: Path) -> None:
    settings = {
        "first": {"target_modules": ["tokens", "head"], "r": 3, "lora_alpha": 4},
        "second": {"target_modules": ["head"], "r": 3, "use_rslora": True},
    }
    model = adapted(settings).float()
    theirs = None
    for name in settings:
        save_adapter(tmp_path / name, model, name)
        if theirs is None:
            theirs = peft.PeftModel.from_pretrained(Model().float(), tmp_path / name, name)
        else:
            theirs.load_adapter(tmp_path / name, name)
    rank = {"svd_rank": 4} if how == "svd" else {}
    theirs.add_weighted_adapter([*settings], [0.7, -1.3], "sum", how, **rank)
    theirs.set_adapter("sum")
    add_weighted_adapter(model, [*settings], [0.7, -1.3], "sum", how, **rank)
    set_adapter(model, "sum")
    torch.testing.assert_close(model(TOKENS), theirs(TOKENS), rtol=1e-4, atol=1e-5)


# What is refused


@pytest.mark.parametrize(
    ("names", "weights", "name", "how", "why"),
    [
        (["first", "secnd"], [1, 1], "sum", {}, "no adapter called 'secnd'; did you mean second"),
        ([], [], "sum", {}, "no adapters to combine"),
        (["first"], [1, 2], "sum", {}, "there are 1 adapters and 2 weights"),
        (["first"], [float("nan")], "sum", {}, "weights are finite numbers, got .nan."),
        (["first"], [1], "second", {}, "has an adapter called 'second' already"),
        (["first"], [1], "a.b", {}, "an adapter's name has no dots"),
        (["first"], [1], "sum", {"combination": "ties"}, "one of cat, svd, linear, got 'ties'"),
        (["first"], [1], "sum", {"svd_rank": 0}, "svd_rank is a rank, at least 1"),
        (["first"], [1], "sum", {"combination": "cat", "svd_rank": 2}, "for svd alone; got 2"),
        (["first"], [1], "sum", {"svd_rank": 3}, "grouped: svd_rank is a multiple of .* groups, 2"),
        (["first", "second"], [1, 1], "sum", {"combination": "linear"}, "head: linear is for"),
    ],
)
def test_what_is_wrong_is_told(
    names: list[str], weights: list[float], name: str, how: dict[str, Any], why: str
) -> None:
    model = adapted()
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(ConfigError, match=why):
        add_weighted_adapter(model, names, weights, name, **how)
    assert {n for n, _ in model.named_parameters()} == before.keys()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"use_dora": True}, "'default' has use_dora"),
        ({"bias": "lora_only"}, "'default' trains biases of the model"),
        ({"modules_to_save": ["conv"]}, "conv: the SavedModule of 'default' cannot be combined"),
        (
            {"trainable_token_indices": {"tokens": [1]}},
            "tokens: the TokenRows of 'default' cannot be combined",
        ),
    ],
)
def test_what_is_no_sum_of_updates_is_refused(settings: dict[str, Any], why: str) -> None:
    model = adapted({"default": {"target_modules": ["head"], **settings}})
    with pytest.raises(ConfigError, match=why):
        add_weighted_adapter(model, ["default"], [1], "sum")


def test_merged_adapters_are_refused() -> None:
    model = adapted({"one": {"target_modules": ["head"]}})
    set_adapter(model, "one")
    merge(model)
    with pytest.raises(ConfigError, match="unmerge them first"):
        add_weighted_adapter(model, ["one"], [1], "sum")

"""EVA against principal directions in float64 and the peft library."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.pytorch_utils import Conv1D

from core_plugin.adapters import add_adapter, inject, merge, save_adapter
from core_plugin.adapters.walk import adapters, modules
from core_plugin.errors import ConfigError
from core_plugin.types.peft import PeftPlugin
from core_plugin_lora.eva import initialize_eva
from core_plugin_lora.linear import LoRALinear
from core_plugin_lora.plugin import LoRA, LoRAParams


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(12, 12)
        self.k = nn.Linear(12, 12)
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.q(x) * self.k(x))
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = Conv1D(3, 12)
        # Its inputs vary in more directions than the others'.
        self.blocks[0].up.weight.data *= 20

    def forward(self, x: Tensor, **ignored: Any) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


TARGETS = ["q", "k", "up", "down", "out"]


def batches(count: int = 3) -> list[Tensor]:
    """Inputs around a mean, in ever fewer directions."""
    generator = torch.Generator().manual_seed(1)
    falls = 0.5 ** torch.arange(12)
    return [torch.randn(4, 6, 12, generator=generator) * falls + 3 for _ in range(count)]


def adapted(model: nn.Module | None = None, name: str = "default", **settings: Any) -> nn.Module:
    params = {"target_modules": TARGETS, "r": 4, "init_lora_weights": "eva", **settings}
    return inject(model or Model(), LoRA, LoRAParams(**params), name)


def layers(model: nn.Module) -> dict[str, LoRALinear]:
    return {path: m for path, m in modules(model) if isinstance(m, LoRALinear)}


def inputs(of: list[Tensor], forward: Any = None) -> dict[str, Tensor]:
    """What each linear layer of the model without adapters is called with, ``[rows, in]``."""
    model, seen = Model().eval(), {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in TARGETS:
            module.register_forward_pre_hook(
                lambda _, args, path=path: seen.setdefault(path, []).append(args[0].detach())
            )
    for batch in of:
        (forward or (lambda model, batch: model(batch)))(model, batch)
    return {path: torch.cat([x.flatten(0, -2) for x in found]) for path, found in seen.items()}


def principal(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The shares of the variance and the directions, from the rows as a whole."""
    rows = rows.double()
    _, s, vh = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    return s.square() / s.square().sum(), vh


def assert_same_directions(found: Tensor, expected: Tensor) -> None:
    """Row by row, up to the sign."""
    cosines = (found.double() * expected.double()).sum(1).abs()
    torch.testing.assert_close(cosines, torch.ones_like(cosines), rtol=0, atol=1e-4)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(len(found)), rtol=0, atol=1e-5)


def down(layer: LoRALinear, name: str = "default") -> Tensor:
    return layer.factors(name)[0][0].detach()


# What it computes


def test_a_is_the_principal_directions_of_the_inputs() -> None:
    model = adapted()
    expected = model(batches()[0])
    initialize_eva(model, batches(), rho=1)
    for path, rows in inputs(batches()).items():
        layer = layers(model)[path]
        assert_same_directions(down(layer), principal(rows)[1][:4])
        assert not layer.factors("default")[0][1].any()
        assert layer.params["default"].r == 4
    assert torch.equal(model.eval()(batches()[0]), copy.deepcopy(model)(batches()[0]))
    assert model(batches()[0]).shape == expected.shape


def test_the_model_computes_what_it_did() -> None:
    model = adapted(lora_dropout=0.3).eval()
    expected = model(batches()[0])
    initialize_eva(model, batches())
    assert torch.equal(model(batches()[0]), expected)
    assert torch.equal(expected, Model().eval()(batches()[0]))


@pytest.mark.parametrize("rho", [1.5, 2.0, 100.0])
def test_ranks_go_where_the_variance_is(rho: float) -> None:
    model = adapted()
    initialize_eva(model, batches(), rho=rho)
    most = min(round(4 * rho), 12)
    shares = [
        (share.item(), path)
        for path, rows in inputs(batches()).items()
        for share in principal(rows)[0][: round(4 * rho)]
    ]
    largest = [path for _, path in sorted(shares, key=lambda s: -s[0])[: 4 * 9]]
    ranks = {path: len(down(layer)) for path, layer in layers(model).items()}
    assert sum(ranks.values()) == 4 * 9
    assert max(ranks.values()) <= max(most, round(4 * rho))
    # Layers with equal inputs have equal shares, so at the border the first one is served.
    for path, rank in ranks.items():
        assert abs(rank - largest.count(path)) <= 1
    assert len(set(ranks.values())) > 1


@pytest.mark.parametrize("rslora", [False, True])
def test_scalings_stay_and_the_adapter_knows_its_ranks(rslora: bool) -> None:
    model = adapted(use_rslora=rslora, lora_alpha=6, alpha_pattern={"up": 3})
    before = {path: layer.params["default"].scaling for path, layer in layers(model).items()}
    initialize_eva(model, batches())
    params = adapters(model)["default"].params
    for path, layer in layers(model).items():
        own = layer.params["default"]
        assert own.scaling == pytest.approx(before[path])
        assert params.rank_pattern.get(path, params.r) == own.r
        assert params.alpha_pattern.get(path, params.lora_alpha) == own.lora_alpha
        assert layer.adapters["default"] is adapters(model)["default"]


@pytest.mark.filterwarnings("ignore:`init_lora_weights` is 'eva' but `eva_config` is not")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to")
def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    model = adapted()
    initialize_eva(model, batches())
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    expected = model.eval()(batches()[0])
    save_adapter(tmp_path, model)
    loaded = Model().eval()
    PeftPlugin.from_pretrained(loaded, tmp_path)
    torch.testing.assert_close(loaded(batches()[0]), expected)
    theirs = peft.PeftModel.from_pretrained(Model().eval(), tmp_path)
    torch.testing.assert_close(theirs(batches()[0]), expected, rtol=1e-5, atol=1e-5)


def test_a_layer_without_variance_loses_the_adapter() -> None:
    model = adapted(target_modules=["blocks.0.q", "blocks.0.down"])
    batch = torch.randn(1, 400, 12, generator=torch.Generator().manual_seed(0))
    model.blocks[0].up.weight.data.zero_()
    before = model.eval()(batch)
    initialize_eva(model, [batch], rho=2)
    assert {path: len(down(layer)) for path, layer in layers(model).items()} == {"blocks.0.q": 8}
    assert type(model.blocks[0].down) is nn.Linear
    assert adapters(model)["default"].params.target_modules == ["blocks.0.q"]
    assert torch.equal(model(batch), before)


# Batches


def test_batches_are_given_as_the_model_takes_them() -> None:
    found = []
    for given in (
        batches(),
        [(x,) for x in batches()],
        [{"x": x} for x in batches()],
        iter(batches()),
    ):
        model = adapted()
        initialize_eva(model, given, rho=1)
        found.append(down(layers(model)["out"]))
    model = adapted()
    initialize_eva(model, [{"wrapped": x} for x in batches()], rho=1, forward=wrapped)
    assert all(torch.equal(one, down(layers(model)["out"])) for one in found)


def wrapped(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["wrapped"])


def test_only_supervised_positions_count() -> None:
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[:, 4:] = 0
    labels = torch.where(mask.cumsum(1) == 1, -100, 7)
    kept = (mask == 1) & (labels != -100)
    given = [{"x": x, "attention_mask": mask, "labels": labels} for x in batches()]
    model = adapted()
    initialize_eva(model, given, rho=1)
    rows = inputs(batches())["blocks.1.q"].view(3, 4, 6, 12)[:, kept]
    assert_same_directions(down(layers(model)["blocks.1.q"]), principal(rows.flatten(0, 1))[1][:4])


def test_the_same_twice() -> None:
    one, other = adapted(), adapted()
    initialize_eva(one, batches())
    initialize_eva(other, batches())
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_layers_with_the_same_input_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    decompositions = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda a: decompositions.append(a) or eigh(a))
    model = adapted()
    initialize_eva(model, batches())
    assert len(decompositions) == 7
    assert torch.equal(down(layers(model)["blocks.0.q"])[:3], down(layers(model)["blocks.0.k"])[:3])


class Inplace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        y = self.first(x)
        x *= torch.arange(12)
        return y + self.second(x)


def test_an_input_that_changed_is_another_one() -> None:
    model = adapted(Inplace(), target_modules=["first", "second"], r=3)
    initialize_eva(model, batches(), rho=1)
    rows = torch.cat(batches()).flatten(0, 1)
    assert_same_directions(down(model.first), principal(rows)[1][:3])
    assert_same_directions(down(model.second), principal(rows * torch.arange(12))[1][:3])


# What it leaves


def test_the_rest_of_the_model_is_as_before() -> None:
    model = adapted()
    add_adapter(model, LoRA, LoRAParams(target_modules=TARGETS), "other")
    model.blocks[1].eval()
    training = {path: module.training for path, module in model.named_modules()}
    other = {n: p.clone() for n, p in model.named_parameters() if ".default." not in n}
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    initialize_eva(model, batches())
    for path, module in model.named_modules():
        if "lora_" not in path:
            assert module.training == training[path]
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".default." in name)
        if ".default." not in name:
            assert torch.equal(parameter, other[name])
    assert {layer.active for layer in layers(model).values()} == {("default",)}


def test_what_fails_changes_nothing() -> None:
    model = adapted()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError):
        initialize_eva(model, [batches()[0], torch.randn(3)])
    assert model.training
    assert all(layer.used == ("default",) for layer in layers(model).values())
    for name, parameter in model.named_parameters():
        assert before[name][0] == id(parameter)
        assert torch.equal(parameter, before[name][1])


@pytest.mark.filterwarnings("ignore:1 layers got no inputs")
def test_a_layer_that_is_not_called_stays_as_it_is() -> None:
    model = adapted()
    model.blocks[0].register_module("unused", nn.Linear(12, 12))
    model = Model()
    model.blocks[0].register_module("unused", nn.Linear(12, 12))
    adapted(model, target_modules=[*TARGETS, "unused"])
    before = down(model.blocks[0].unused)
    initialize_eva(model, batches())
    assert torch.equal(down(model.blocks[0].unused), before)


def test_dora_keeps_its_lengths() -> None:
    model = adapted(use_dora=True).eval()
    expected = model(batches()[0])
    initialize_eva(model, batches())
    torch.testing.assert_close(model(batches()[0]), expected)


@pytest.mark.parametrize(
    ("settings", "arguments", "why"),
    [
        ({}, {"name": "defualt"}, "no adapter called 'defualt'; did you mean default"),
        ({"init_lora_weights": True}, {}, "has init_lora_weights=True; EVA is for 'eva'"),
        ({"target_modules": ["table"]}, {}, "'default' has no linear layer"),
        ({}, {"rho": 0.9}, "rho is a factor of at least 1, got 0.9"),
        ({}, {"batches": []}, "no batch reached a layer"),
    ],
)
def test_what_is_wrong_is_told(
    settings: dict[str, Any], arguments: dict[str, Any], why: str
) -> None:
    model = Model()
    model.table = nn.Embedding(3, 4)
    adapted(model, **settings)
    with pytest.raises(ConfigError, match=why):
        initialize_eva(model, **{"batches": batches(), **arguments})


def test_merged_adapters_are_refused() -> None:
    model = adapted()
    merge(model)
    with pytest.raises(ConfigError, match="unmerge them first"):
        initialize_eva(model, batches())


# Against the peft library


@pytest.mark.filterwarnings("ignore:lora with eva initialization used with low_cpu_mem_usage")
@pytest.mark.parametrize("rho", [1.0, 2.0])
def test_peft_finds_the_same(rho: float) -> None:
    batch = torch.cat(batches(40))
    rows = batch.flatten(0, 1)
    config = peft.LoraConfig(
        target_modules=["up", "down"],
        r=3,
        lora_alpha=16,
        init_lora_weights="eva",
        eva_config=peft.EvaConfig(rho=rho, tau=0.999999),
    )
    theirs = peft.get_peft_model(Model(), config)
    peft.initialize_lora_eva_weights(
        theirs,
        DataLoader(rows, batch_size=len(rows)),
        forward_fn=lambda model, batch: model(batch),
        prepare_model_inputs_fn=None,
        prepare_layer_inputs_fn=None,
        show_progress_bar=False,
    )
    model = adapted(target_modules=["up", "down"], r=3)
    initialize_eva(model, [rows], rho=rho)
    ours = {path: down(layer) for path, layer in layers(model).items()}
    found = {
        path.removeprefix("base_model.model."): module.lora_A["default"].weight.detach()
        for path, module in theirs.named_modules()
        if hasattr(module, "lora_A")
    }
    assert {path: a.shape for path, a in ours.items()} == {p: a.shape for p, a in found.items()}
    for path, a in ours.items():
        cosines = (a * found[path]).sum(1).abs()
        assert cosines.min() > 0.999, path

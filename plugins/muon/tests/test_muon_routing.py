"""Which parameters Muon takes."""

import pytest
import torch
from torch import nn

from core_plugin_muon.routing import format_routes, route

VOCABULARY, WIDTH = 50, 8


class Block(nn.Module):
    def __init__(self, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(torch.relu(self.up(x)))


class LanguageModel(nn.Module):
    """Names are chosen to mislead whoever goes by them."""

    def __init__(self, tied: bool = False, positions: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        self.table = nn.Embedding(positions, WIDTH)
        self.embed_layers = nn.ModuleList([Block(), Block()])
        self.proj = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.proj.weight = self.encoder.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.encoder(tokens) + self.table(torch.arange(tokens.shape[-1]))
        for layer in self.embed_layers:
            x = layer(x)
        return self.proj(x)


def reasons(model: nn.Module) -> dict[str, str]:
    return {row.name: row.reason for row in route(model)}


def of_muon(model: nn.Module) -> list[str]:
    return [row.name for row in route(model) if row.algorithm == "muon"]


HIDDEN = [f"embed_layers.{i}.{name}.weight" for i in (0, 1) for name in ("attention", "up", "down")]


def test_language_model_untied() -> None:
    model = LanguageModel()
    assert of_muon(model) == HIDDEN
    assert reasons(model) == {
        "encoder.weight": "embedding",
        "table.weight": "embedding",
        "proj.weight": "output head",
        **dict.fromkeys(HIDDEN, "hidden matrix"),
        **{
            f"embed_layers.{i}.{name}": "1-dimensional"
            for i in (0, 1)
            for name in ("norm.weight", "norm.bias", "up.bias", "down.bias")
        },
    }


def test_tied_weights_are_listed_once_and_kept_from_muon() -> None:
    found = reasons(LanguageModel(tied=True))
    assert found["encoder.weight"] == "tied to an embedding"
    assert "proj.weight" not in found


def test_a_position_table_as_long_as_a_layer_is_wide_makes_no_heads() -> None:
    for positions in (WIDTH, 4 * WIDTH):
        assert of_muon(LanguageModel(positions=positions)) == HIDDEN


def test_heads_in_a_list_are_heads() -> None:
    model = LanguageModel()
    model.proj = nn.ModuleList([nn.Linear(WIDTH, VOCABULARY) for _ in range(2)])
    assert reasons(model)["proj.1.weight"] == "output head"


def test_every_trainable_parameter_has_one_row_with_its_shape() -> None:
    model = LanguageModel(tied=True)
    model.embed_layers[0].requires_grad_(False)
    rows = route(model)
    trainable = {id(p): tuple(p.shape) for p in model.parameters() if p.requires_grad}
    assert {id(row.parameter): row.shape for row in rows} == trainable
    assert len(rows) == len(trainable)
    assert of_muon(model) == HIDDEN[3:]


class LowRank(nn.Linear):
    """An adapter around a linear layer: the factors are adapter's, the base is frozen."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.is_adapter = True
        self.first = nn.Parameter(torch.zeros(2, WIDTH))
        self.weight.requires_grad_(False)


def test_adapters_go_to_adamw() -> None:
    model = nn.ModuleDict({"adapted": LowRank(), "full": nn.Linear(WIDTH, WIDTH)})
    assert reasons(model) == {
        "adapted.first": "adapter",
        "adapted.bias": "adapter",
        "full.weight": "hidden matrix",
        "full.bias": "1-dimensional",
    }


def test_what_is_not_a_linear_weight_goes_to_adamw() -> None:
    class Gated(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.extra = nn.Parameter(torch.zeros(4, 4))

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(4, 4))
            self.experts = nn.Parameter(torch.zeros(2, 4, 4))
            self.convolution = nn.Conv2d(3, 4, 3)
            self.attention = nn.MultiheadAttention(WIDTH, 2)
            self.gate = nn.Linear(WIDTH, 1)
            self.bag = nn.EmbeddingBag(6, 4)
            self.gated = Gated()

    found = reasons(Odd())
    assert found["table"] == found["attention.in_proj_weight"] == "not the weight of a Linear"
    assert found["gated.extra"] == "not the weight of a Linear"
    assert found["gated.weight"] == "hidden matrix"
    assert found["experts"] == "3-dimensional"
    assert found["convolution.weight"] == "4-dimensional"
    assert found["attention.out_proj.weight"] == "hidden matrix"
    assert found["gate.weight"] == "one row or column"
    assert found["bag.weight"] == "embedding"


def test_works_on_the_meta_device() -> None:
    with torch.device("meta"):
        assert of_muon(LanguageModel()) == HIDDEN


def test_wrappers_leave_no_trace() -> None:
    plain = [(row.name, row.algorithm) for row in route(LanguageModel())]
    compiled = torch.compile(LanguageModel(), backend="eager")
    parallel = nn.DataParallel(LanguageModel())
    nested = LanguageModel()
    nested.embed_layers[1] = torch.compile(nested.embed_layers[1], backend="eager")
    for model in (compiled, parallel, nn.DataParallel(nested)):
        assert [(row.name, row.algorithm) for row in route(model)] == plain


def test_a_module_of_the_users_own_named_module_keeps_its_name() -> None:
    assert of_muon(nn.ModuleDict({"module": nn.Linear(4, 4, bias=False)})) == ["module.weight"]


def test_nothing_for_muon_is_an_error_that_says_why() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 9))
    with pytest.raises(ValueError, match="optimizer adamw") as error:
        route(model)
    for part in (
        "1 embedding (such as 0.weight, shape (9, 4))",
        "3 1-dimensional (such as 1.weight, shape (4,))",
        "1 output head (such as 2.weight, shape (9, 4))",
    ):
        assert part in str(error.value)


def test_a_frozen_model_is_an_error() -> None:
    with pytest.raises(ValueError, match="trains no parameter"):
        route(LanguageModel().requires_grad_(False))


def test_parameters_hidden_from_the_model_are_an_error() -> None:
    class Hiding(nn.Linear):
        def named_parameters(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            yield "weight", self.weight

    with pytest.raises(ValueError, match="not certain what is to be trained: bias"):
        route(Hiding(3, 3))


def test_the_table_has_a_line_for_each_parameter() -> None:
    lines = format_routes(route(LanguageModel())).splitlines()
    assert lines[0].split() == ["encoder.weight", "50x8", "adamw", "embedding"]
    assert len(lines) == 17

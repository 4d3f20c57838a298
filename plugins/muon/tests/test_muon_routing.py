"""Which parameters Muon takes, and how it sees them."""

from dataclasses import replace

import pytest
import torch
from muon_routed import (
    HIDDEN,
    VOCABULARY,
    WIDTH,
    Block,
    Experts,
    LanguageModel,
    of_muon,
    reasons,
    rows,
    with_hidden,
)
from torch import nn

from core_plugin_muon.options import Rule
from core_plugin_muon.routing import route

# Language models


def test_a_language_model_with_a_head_of_its_own() -> None:
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


def test_a_matrix_tied_to_a_head_is_none_of_muons() -> None:
    model = LanguageModel()
    model.before = nn.Linear(WIDTH, VOCABULARY, bias=False)
    model.embed_layers[1].extra = nn.Linear(WIDTH, VOCABULARY, bias=False)
    model.embed_layers[1].extra.weight = model.before.weight
    assert reasons(model)["embed_layers.1.extra.weight"] == "output head"


def test_layers_that_share_their_weights_are_one_hidden_matrix() -> None:
    model = LanguageModel()
    model.embed_layers[1] = model.embed_layers[0]
    assert of_muon(model) == HIDDEN[:3]


def test_a_position_table_as_long_as_a_layer_is_wide_makes_no_heads() -> None:
    for positions in (WIDTH, 4 * WIDTH):
        assert of_muon(LanguageModel(positions=positions)) == HIDDEN


def test_names_of_embeddings_are_no_matter() -> None:
    """wte, which lists of names such as embed_tokens and lm_head leave out, and tok and output."""
    for table, head in (("wte", "lm_head"), ("tok", "output"), ("tok", "score"), ("pos", "out")):
        model = LanguageModel()
        setattr(model, table, model.encoder)
        setattr(model, head, model.proj)
        del model.encoder, model.proj
        found = rows(model)
        assert found[f"{table}.weight"].algorithm == found[f"{head}.weight"].algorithm == "adamw"
        assert of_muon(model) == HIDDEN


def test_every_trainable_parameter_has_one_row_with_its_shape() -> None:
    """Those of one dimension too, which some choose neither for Muon nor for AdamW."""
    model = LanguageModel(tied=True)
    model.embed_layers[0].requires_grad_(False)
    found = route(model)
    trainable = {id(p): tuple(p.shape) for p in model.parameters() if p.requires_grad}
    assert {id(row.parameter): row.shape for row in found} == trainable
    assert len(found) == len(trainable)
    assert of_muon(model) == HIDDEN[3:]
    assert sum(row.algorithm == "adamw" and len(row.shape) == 1 for row in found) == 4


# Types of layers


def test_experts_are_a_stack_if_their_owner_says_how_many() -> None:
    found = rows(Experts(4))
    assert of_muon(Experts(4)) == ["up"]
    assert (found["up"].reason, found["up"].flatten, found["up"].split) == (
        "stack of experts",
        False,
        (),
    )
    assert found["up_bias"].reason == found["router"].reason == "matrix of no known layer"
    assert found["scale"].reason == "one row or column"
    undeclared = reasons(with_hidden(experts=Experts(5)))["experts.up"]
    assert undeclared == "3-dimensional (a stack has num_experts or a rule)"


def test_convolutions_are_flattened_and_depthwise_ones_left() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.Conv2d(16, 16, 7, groups=16),
        nn.Conv1d(16, 32, 4, groups=4),
        nn.ConvTranspose2d(32, 16, 2),
        nn.Conv3d(16, 1, 3),
        nn.Conv2d(1, 16, 3),
        nn.Linear(16, 10),
    )
    found = rows(model)
    assert [
        (row.algorithm, row.flatten, row.split) for row in found.values() if len(row.shape) > 1
    ] == [
        ("muon", True, ()),
        ("adamw", False, ()),
        ("muon", True, (8, 8, 8, 8)),
        ("muon", True, ()),
        ("adamw", False, ()),
        ("muon", True, ()),
        ("adamw", False, ()),
    ]
    assert found["0.weight"].reason == "convolution"
    assert found["1.weight"].reason == "depthwise convolution"
    assert found["2.weight"].reason == "convolution, each group by itself"
    assert found["4.weight"].reason == "one row or column"


def test_projections_of_multi_head_attention() -> None:
    found = rows(nn.MultiheadAttention(WIDTH, 2, add_bias_kv=True))
    assert found["in_proj_weight"].split == (WIDTH, WIDTH, WIDTH)
    assert found["out_proj.weight"].reason == "hidden matrix"
    assert found["bias_k"].algorithm == "adamw"
    apart = of_muon(nn.MultiheadAttention(WIDTH, 2, kdim=6, vdim=10))
    assert apart == ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"]


def test_what_is_of_no_known_layer_goes_to_adamw() -> None:
    class Gated(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.extra = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    model = with_hidden(
        gated=Gated(),
        tables=nn.ParameterDict(
            {"positions": torch.zeros(16, WIDTH), "steps": torch.zeros(3, 4, 5)}
        ),
        recurrent=nn.LSTM(WIDTH, WIDTH),
        bilinear=nn.Bilinear(WIDTH, WIDTH, WIDTH),
        gate=nn.Linear(WIDTH, 1),
        bag=nn.EmbeddingBag(6, 4),
        waves=nn.Linear(WIDTH, WIDTH, dtype=torch.complex64),
        normalized=nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    )
    found = reasons(model)
    assert of_muon(model) == ["hidden.weight", "gated.weight"]
    assert found["gated.extra"] == found["tables.positions"] == "matrix of no known layer"
    assert found["recurrent.weight_hh_l0"] == "matrix of no known layer"
    assert found["tables.steps"].startswith("3-dimensional")
    assert found["bilinear.weight"].startswith("3-dimensional")
    assert found["gate.weight"] == "one row or column"
    assert found["bag.weight"] == "embedding"
    assert found["waves.weight"] == "complex"


def test_flat_parameters_are_no_matrices() -> None:
    """As of wrappers that join all parameters of a module to one."""
    flat = nn.ParameterList([nn.Parameter(torch.zeros(500))])
    with pytest.raises(ValueError, match="1-dimensional: 1, such as 0 of shape"):
        route(flat)


# Adapters


class LowRank(nn.Linear):
    """An adapter around a linear layer: the factors are adapter's, the base is frozen."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.is_adapter = True
        self.first = nn.Linear(WIDTH, 2)
        self.weight.requires_grad_(False)


class PeftLayer(nn.Module):
    """As the peft library builds them."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, WIDTH, bias=False)})


def test_adapters_go_to_adamw_and_what_they_adapt_does_not() -> None:
    assert reasons(with_hidden(adapted=LowRank(), other=PeftLayer())) == {
        "hidden.weight": "hidden matrix",
        "adapted.bias": "adapter",
        "adapted.first.weight": "adapter",
        "adapted.first.bias": "adapter",
        "other.base_layer.weight": "hidden matrix",
        "other.lora_A.default.weight": "adapter",
        "other.lora_B.default.weight": "adapter",
    }


def test_a_model_that_trains_adapters_alone_is_none_for_muon() -> None:
    model = PeftLayer()
    model.base_layer.requires_grad_(False)
    with pytest.raises(ValueError, match=r"adapter: 2, such as lora_A\.default\.weight"):
        route(model)


# Wrapping


def test_the_meta_device_will_do() -> None:
    with torch.device("meta"):
        assert of_muon(LanguageModel()) == HIDDEN


def test_wrappers_leave_no_trace() -> None:
    plain = [replace(row, parameter=None) for row in route(LanguageModel())]
    compiled = torch.compile(LanguageModel(), backend="eager")
    parallel = nn.DataParallel(LanguageModel())
    nested = LanguageModel()
    nested.embed_layers[1] = torch.compile(nested.embed_layers[1], backend="eager")
    in_sequence = LanguageModel()
    in_sequence.embed_layers = nn.Sequential(Block(), torch.compile(Block(), backend="eager"))
    for model in (compiled, parallel, nn.DataParallel(nested), in_sequence):
        assert [replace(row, parameter=None) for row in route(model)] == plain


def test_a_module_of_the_users_own_named_module_keeps_its_name() -> None:
    assert of_muon(nn.ModuleDict({"module": nn.Linear(4, 4, bias=False)})) == ["module.weight"]


# Errors


def test_nothing_for_muon_is_an_error_that_says_why() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 9))
    with pytest.raises(ValueError, match="optimizer adamw") as error:
        route(model)
    for part in (
        "embedding: 1, such as 0.weight of shape (9, 4)",
        "1-dimensional: 3, such as 1.weight of shape (4,)",
        "output head: 1, such as 2.weight of shape (9, 4)",
        "send a matrix to muon by a rule",
    ):
        assert part in str(error.value)
    assert [row.algorithm for row in route(model, [Rule("2.weight", "muon")])].count("muon") == 1


def test_rules_that_leave_nothing_for_muon_are_an_error() -> None:
    told = r"rule 'embed_layers.+': 6, such as embed_layers\.0.+ or change the rules"
    with pytest.raises(ValueError, match=told):
        route(LanguageModel(), [Rule(r"embed_layers.*(attention|up|down)\.weight", "adamw")])


def test_a_frozen_model_is_an_error() -> None:
    with pytest.raises(ValueError, match="trains no parameter"):
        route(LanguageModel().requires_grad_(False))


def test_parameters_hidden_from_the_model_are_an_error() -> None:
    class Hiding(nn.Linear):
        def named_parameters(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            yield "weight", self.weight

    with pytest.raises(ValueError, match="not certain what is to be trained: bias"):
        route(Hiding(3, 3))

"""What the user decides by name, and what is said of rules that cannot be."""

import re

import pytest
from muon_routed import WIDTH, Experts, LanguageModel, rows, with_hidden
from torch import nn

from core_plugin_muon.options import Rule
from core_plugin_muon.routing import route


def test_the_first_rule_that_matches_decides() -> None:
    model = LanguageModel()
    found = rows(
        model,
        Rule(r"layers\.0\.up", "skip"),
        Rule("up", "adamw"),
        Rule("^table", "muon"),
        Rule("attention", "muon", split=(WIDTH,) * 3),
    )
    assert found["embed_layers.0.up.weight"].algorithm == "skip"
    assert found["embed_layers.0.up.bias"].reason == r"rule 'layers\\.0\\.up'"
    assert found["embed_layers.1.up.weight"].algorithm == "adamw"
    assert found["table.weight"].algorithm == "muon"
    assert found["embed_layers.1.attention.weight"].split == (WIDTH,) * 3
    assert found["embed_layers.1.down.weight"].reason == "hidden matrix"


def test_a_rule_may_name_any_place_of_a_tied_parameter() -> None:
    assert (
        rows(LanguageModel(tied=True), Rule("^proj", "skip"))["encoder.weight"].algorithm == "skip"
    )


def test_a_rule_that_does_not_say_how_to_see_matrices_leaves_it_to_the_type() -> None:
    model = with_hidden(
        convolution=nn.Conv2d(4, 6, 3, groups=2),
        depthwise=nn.Conv2d(6, 6, 3, groups=6),
        attention=nn.MultiheadAttention(WIDTH, 2),
        experts=Experts(3),
    )
    found = rows(model, Rule(r"convolution.weight|depthwise.weight|in_proj_weight|up$", "muon"))
    assert (found["convolution.weight"].flatten, found["convolution.weight"].split) == (
        True,
        (3, 3),
    )
    assert (found["depthwise.weight"].flatten, found["depthwise.weight"].split) == (True, ())
    assert found["attention.in_proj_weight"].split == (WIDTH,) * 3
    assert (found["experts.up"].algorithm, found["experts.up"].flatten) == ("muon", False)
    flat = rows(model, Rule("experts.up$", "muon", split=(1, 3), flatten=True))["experts.up"]
    assert (flat.flatten, flat.split) == (True, (1, 3))


def test_a_stack_is_split_within_each_matrix() -> None:
    found = rows(Experts(4), Rule("up$", "muon", split=(WIDTH, WIDTH)))
    assert found["up"].split == (WIDTH, WIDTH)


def test_a_rule_that_matches_nothing_is_an_error_with_near_names() -> None:
    with pytest.raises(ValueError, match="no parameter") as error:
        route(LanguageModel(), [Rule("atention", "adamw"), Rule("zzz", "skip")])
    assert str(error.value).splitlines() == [
        "the rule 'atention' matches no parameter; did you mean embed_layers.0.attention.weight?",
        "the rule 'zzz' matches no parameter",
    ]


def test_a_rule_for_what_is_frozen_says_so() -> None:
    model = LanguageModel()
    model.table.requires_grad_(False)
    with pytest.raises(ValueError, match="the rule 'table' matches frozen parameters alone"):
        route(model, [Rule("table", "skip")])


def test_what_a_rule_cannot_do_is_told_once() -> None:
    with pytest.raises(ValueError, match="rule") as error:
        route(
            LanguageModel(),
            [Rule("bias", "muon"), Rule("attention", "muon", split=(8, 8, 4, 5))],
        )
    assert str(error.value).splitlines() == [
        "the rule 'bias' sends embed_layers.0.norm.bias of shape (8,) to muon, but it is no matrix",
        "the rule 'attention' splits embed_layers.0.attention.weight into [8, 8, 4, 5], 25 rows "
        "in all, but it has 24",
    ]


def test_a_rule_that_others_leave_nothing_to_is_an_error() -> None:
    rules = [Rule("up", "adamw"), Rule("down.w", "muon"), Rule(r"(up|down)\.weight", "skip")]
    with pytest.raises(ValueError, match="decides nothing") as error:
        route(LanguageModel(), rules)
    assert str(error.value) == (
        "the rule '(up|down)\\\\.weight' decides nothing: 'up' and 'down.w' before it takes all "
        "that it matches; put it first, or leave it out"
    )


def test_rules_may_be_mappings_and_their_splits_lists() -> None:
    rules = [{"match": "attention", "to": "muon", "split": [WIDTH] * 3}]
    found = rows(LanguageModel(), *rules)["embed_layers.0.attention.weight"]
    assert found.split == (WIDTH,) * 3
    assert Rule("x", "muon", split=[1, 2]) == Rule("x", "muon", split=(1, 2))
    assert len({Rule("x", "muon", split=[1, 2])}) == 1


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (Rule("x", "skip"), "rules must be a list of rules, but is Rule"),
        ({"match": "x", "to": "skip"}, "rules must be a list of rules, but is {'match'"),
        ("x", "rules must be a list of rules, but is 'x'"),
        (["x"], "rules[0] must be a Rule or a mapping of its fields, but is 'x'"),
        (
            [Rule("bias", "skip"), {"match": "x", "too": "muon"}],
            "rules[1] does not know 'too', lacks 'to'; its fields are match, to, split, flatten",
        ),
        ([{"match": "(", "to": "skip"}], "rules[0]: match: '(' is no regular expression"),
        ([{"match": 3, "to": "skip"}], "rules[0]: match: 3 is no regular expression"),
    ],
)
def test_what_is_no_rule_is_an_error(rules: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        route(LanguageModel(), rules)

"""Which modules the rules choose, against a plain reference; and what is said when none is."""

import copy
import dataclasses
import re
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from core_plugin.adapters.layer import AdapterLayer, ParameterLayer
from core_plugin.adapters.matching import Choice, choose
from core_plugin.adapters.tree import Sites
from core_plugin.types.peft import PeftParams

NAMES = ["a", "b", "q", "q_proj", "my_q", "0", "1", "12"]
PATTERNS = {"rank_pattern": "r", "alpha_pattern": "alpha", "feedforward_modules": "feedforward"}


@dataclasses.dataclass(frozen=True)
class Params(PeftParams):
    r: int = 8
    alpha: int = 16
    feedforward: bool = False
    rank_pattern: dict[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: dict[str, int] = dataclasses.field(default_factory=dict)
    feedforward_modules: str | list[str] | None = None
    target_parameters: str | list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.r < 1:
            raise ValueError(f"r is at least 1, got {self.r}")


class Group(nn.Module):
    """A container with children and parameters by name."""

    def __init__(self, **parts: nn.Module | torch.Tensor) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            else:
                self.register_parameter(name, nn.Parameter(part))


def linear() -> nn.Linear:
    return nn.Linear(2, 2, device="meta")


def tree(paths: list[str]) -> nn.Module:
    """A model of plain containers that has these paths, and those above them."""
    model = nn.Module()
    for path in paths:
        module = model
        for part in path.split("."):
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
    return model


def choice(
    model: nn.Module, defaults: Mapping[str, object] | None = None, **fields: object
) -> Choice:
    return choose(Sites(model), Params(**fields), PATTERNS, defaults or {})


def chosen(model: nn.Module, **fields: object) -> set[str]:
    """The paths of the targets, where nothing is said about the rules."""
    found = choice(model, **fields)
    assert found.faults == []
    assert found.warnings == []
    return {path for site in found.targets for path in site.paths}


def faults(model: nn.Module, **fields: object) -> list[str]:
    return choice(model, **fields).faults


def fault(model: nn.Module, **fields: object) -> str:
    (only,) = faults(model, **fields)
    return only


def about(messages: list[str], field: str) -> list[str]:
    return [message for message in messages if message.startswith(f"peft.{field}: ")]


def decoder(blocks: int = 3, experts: int = 2) -> nn.Module:
    """Blocks with attention and experts, a tied embedding's worth of head, and final layers."""

    def block() -> nn.Module:
        each = (Group(w1=linear(), w2=linear()) for _ in range(experts))
        return Group(
            self_attn=Group(q_proj=linear(), v_proj=linear()),
            mlp=Group(gate=linear(), experts=nn.ModuleList(each)),
        )

    return Group(
        model=Group(
            tokens=nn.Embedding(11, 2), layers=nn.ModuleList(block() for _ in range(blocks))
        ),
        lm_head=nn.Linear(2, 11),
    )


# Against a plain reference


def fits(rule: str | list[str] | None, path: str) -> bool:
    """A rule as it is written down, without any cleverness."""
    if isinstance(rule, str):
        return re.fullmatch(rule, path) is not None
    return any(path == entry or path.endswith("." + entry) for entry in rule or [])


def block(path: str, lists: list[str] | None) -> int | None:
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit() and (lists is None or fits(lists, ".".join(parts[:i]))):
            return int(part)
    return None


def reference(every: list[str], rules: Params) -> list[str]:
    saved = [path for path in every if fits(rules.modules_to_save, path)]
    targets = []
    for path in every:
        if fits(rules.exclude_modules, path):
            continue
        if any(path.startswith(f"{outer}.") for outer in saved):
            continue
        if not fits(rules.target_modules, path):
            continue
        layers = rules.layers_to_transform
        wanted = [layers] if isinstance(layers, int) else layers
        if wanted and block(path, rules.layers_pattern) not in wanted:
            continue
        targets.append(path)
    return targets


def unmatched(rule: str | list[str] | None, every: list[str]) -> list[str]:
    entries = [rule] if isinstance(rule, str) else list(dict.fromkeys(rule or []))
    as_rule = (lambda e: e) if isinstance(rule, str) else (lambda e: [e])
    return [entry for entry in entries if not any(fits(as_rule(entry), path) for path in every)]


paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=5).map(".".join)
models = st.lists(paths, min_size=1, max_size=10)
regexes = st.sampled_from([r".*q", r"a\.b", r"(a|b)\..*", r".*\.\d+\..*", "q", r".*(?<!_)q.*"])
names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=2).map(".".join)
lists = st.lists(names, min_size=1, max_size=3)
rules = st.one_of(regexes, lists)
numbers = st.sampled_from([0, 1, 12])


@st.composite
def params(draw: st.DrawFn) -> Params:
    layers = draw(st.one_of(st.none(), numbers, st.lists(numbers, max_size=2)))
    return Params(
        target_modules=draw(rules if layers is None else lists),
        exclude_modules=draw(st.one_of(st.none(), rules)),
        modules_to_save=draw(st.one_of(st.none(), lists)),
        layers_to_transform=layers,
        layers_pattern=None if layers is None else draw(st.one_of(st.none(), lists)),
    )


def paths_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name]


@given(models, params())
def test_rules_choose_as_written(written: list[str], rules: Params) -> None:
    model = tree(written)
    every = paths_of(model)
    found = choose(Sites(model), rules, {}, {})
    expected = reference(every, rules)
    assert [site.path for site in found.targets] == expected
    saved = [path for path in every if fits(rules.modules_to_save, path)]
    outermost = [p for p in saved if not any(p.startswith(f"{outer}.") for outer in saved)]
    assert [site.path for site in found.saved] == outermost


@given(models, params())
def test_every_entry_that_matches_nothing_is_told(written: list[str], rules: Params) -> None:
    model = tree(written)
    every = paths_of(model)
    found = choose(Sites(model), rules, {}, {})
    told = about(found.faults, "target_modules")
    both = any(site in found.saved for site in found.targets)
    if found.targets:
        assert len(told) == len(unmatched(rules.target_modules, every)) + both
    else:
        assert len(told) == 1
    for entry in unmatched(rules.target_modules, every):
        assert repr(entry) in " ".join(told)
    unused = about(found.warnings, "exclude_modules")
    assert len(unused) == len(unmatched(rules.exclude_modules, every))
    missing = about(found.faults, "modules_to_save")
    assert len(missing) == len(unmatched(rules.modules_to_save, every))


def fields_of(messages: list[str]) -> list[str]:
    return sorted(message.partition(": ")[0] for message in messages)


@given(models, params(), st.randoms())
def test_the_order_of_modules_changes_nothing(
    written: list[str], rules: Params, order: object
) -> None:
    mixed = copy.copy(written)
    order.shuffle(mixed)  # type: ignore[attr-defined]
    one, other = (choose(Sites(tree(each)), rules, {}, {}) for each in (written, mixed))
    for part in ("targets", "saved"):
        here, there = ({s.path for s in getattr(each, part)} for each in (one, other))
        assert here == there
    assert fields_of(one.faults) == fields_of(other.faults)
    assert fields_of(one.warnings) == fields_of(other.warnings)


@given(models, lists, st.randoms())
def test_the_order_and_number_of_entries_change_nothing(
    written: list[str], rule: list[str], order: object
) -> None:
    model = tree(written)
    mixed = [*rule, *rule]
    order.shuffle(mixed)  # type: ignore[attr-defined]
    one, other = (choice(model, target_modules=each) for each in (rule, mixed))
    assert [s.path for s in one.targets] == [s.path for s in other.targets]
    assert len(one.faults) == len(other.faults)


@given(models, lists)
def test_names_and_the_regular_expression_for_them_choose_alike(
    written: list[str], rule: list[str]
) -> None:
    model = tree(written)
    regex = rf"(.*\.)?({'|'.join(map(re.escape, rule))})"
    by_name, by_regex = choice(model, target_modules=rule), choice(model, target_modules=regex)
    assert [s.path for s in by_name.targets] == [s.path for s in by_regex.targets]


# Patterns, against a plain reference


def rank(key: str, path: str) -> int | None:
    """How specific a key is at a path: None if it does not fit; 0 for a regular expression."""
    if key.startswith("^") and re.fullmatch(r"[\w.]+", key[1:]):
        return 100 if key[1:] == path else None
    if not re.fullmatch(r"[\w.]+", key):
        return 0 if re.match(rf"(.*\.)?({key})$", path) else None
    if key == path:
        return 100
    return len(key.split(".")) if path.endswith("." + key) else None


keys = st.one_of(names, names.map("^{}".format), st.sampled_from([r".*q", r"(a|b)\.\w+", r"^a.*"]))


@given(models, st.dictionaries(keys, st.integers(1, 3), max_size=4))
def test_the_most_specific_key_wins(written: list[str], pattern: dict[str, int]) -> None:
    model = tree(written)
    found = choice(model, target_modules=".*", rank_pattern=pattern)
    tied = False
    for site in found.targets:
        ranks = {key: rank(key, site.path) for key in pattern}
        best = max((r for r in ranks.values() if r is not None), default=None)
        values = {pattern[key] for key, r in ranks.items() if r is not None and r == best}
        if len(values) > 1:
            tied = True
        else:
            (value,) = values or {8}
            assert found.params_of(site).r == value
    told = about(found.faults, "rank_pattern")
    unused = [k for k in pattern if all(rank(k, p) is None for p in paths_of(model))]
    assert len([m for m in told if "neither is more specific" not in m]) == len(unused)
    assert any("neither is more specific" in m for m in told) == tied


def test_patterns_are_looked_up_independently() -> None:
    model = Group(a=Group(q=linear(), v=linear()), b=Group(q=linear(), v=linear()))
    found = choice(
        model,
        target_modules=["q", "v"],
        rank_pattern={"q": 2, "b.q": 16},
        alpha_pattern={"^a.v": 1},
        feedforward_modules=["v"],
    )
    assert found.faults == []
    values = {s.path: dataclasses.astuple(found.params_of(s))[7:10] for s in found.targets}
    assert values == {
        "a.q": (2, 16, False),
        "a.v": (8, 1, True),
        "b.q": (16, 16, False),
        "b.v": (8, 16, True),
    }


def test_a_name_with_more_dots_is_more_specific() -> None:
    layers = nn.ModuleList(Group(a=Group(q=linear()), b=Group(q=linear())) for _ in range(2))
    model = Group(layers=layers)
    pattern = {"b.q": 2, "1.b.q": 3, "q": 4, "^layers.0.a.q": 5, ".*": 6}
    for order in (list(pattern), list(pattern)[::-1]):
        found = choice(model, rank_pattern={key: pattern[key] for key in order})
        assert [found.params_of(site).r for site in found.targets] == [5, 2, 4, 3]


def test_a_regular_expression_fits_a_whole_path_or_its_end_after_a_dot() -> None:
    model = Group(a=Group(q=linear(), my_q=linear(), q_proj=linear()), q=linear())
    found = choice(model, rank_pattern={"(q|k)": 2, "^(a.q_proj)": 4})
    assert [found.params_of(site).r for site in found.targets] == [2, 8, 4, 2]


def test_equal_outcomes_are_one_object() -> None:
    model = nn.Sequential(*(linear() for _ in range(4)))
    found = choice(model, rank_pattern={"0": 2, "1": 2})
    first, second, third, last = map(found.params_of, found.targets)
    assert first is second
    assert third is last is found.params
    assert found.params.r == 8


def test_a_key_that_fits_no_target_is_a_fault_with_near_names() -> None:
    model = Group(q_proj=linear(), v_proj=linear())
    told = fault(model, target_modules=["q_proj"], rank_pattern={"q_prj": 2})
    assert told == "peft.rank_pattern: no target is called 'q_prj'; did you mean q_proj?"
    assert "no target is called 'v_proj'" in fault(
        model, target_modules=["q_proj"], alpha_pattern={"v_proj": 2}
    )
    assert fault(model, rank_pattern={"k.*": 2}) == "peft.rank_pattern: 'k.*' matches no target"
    assert "'(' is not a regular expression" in fault(model, rank_pattern={"(": 2})
    assert "no target is called 'up'" in fault(model, feedforward_modules=["up"])


def test_two_keys_that_are_equally_specific_have_to_agree() -> None:
    model = Group(q_proj=linear())
    assert choice(model, rank_pattern={"q.*": 2, ".*proj": 2}).faults == []
    assert fault(model, rank_pattern={"q.*": 2, ".*proj": 3}) == (
        "peft.rank_pattern: 'q.*' (2) and '.*proj' (3) fit the same target, and neither is more "
        "specific"
    )
    assert choice(model, rank_pattern={"q.*": 2, ".*proj": 3, "q_proj": 4}).faults == []


def test_a_value_that_the_parameters_refuse_is_a_fault() -> None:
    told = fault(Group(q=linear()), rank_pattern={"q": 0})
    assert told == "peft.rank_pattern: 'q': r is at least 1, got 0"


def test_patterns_of_an_architecture_do_not_have_to_match() -> None:
    model = Group(q=linear(), up=linear())
    defaults = {"target_modules": ["q", "up"], "feedforward_modules": ["up"]}
    found = choice(model, defaults)
    assert [found.params_of(s).feedforward for s in found.targets] == [False, True]
    assert choice(model, defaults, target_modules=["q"]).faults == []


# Targets


def test_a_name_is_whole() -> None:
    model = Group(q_proj=linear(), my_q_proj=linear())
    assert chosen(model, target_modules=["q_proj"]) == {"q_proj"}
    assert chosen(model, target_modules=".*q_proj") == {"q_proj", "my_q_proj"}
    assert chosen(model, target_modules=".*", exclude_modules=["q_proj"]) == {"my_q_proj"}


def test_what_a_model_lacks_has_no_path() -> None:
    model = Group(q=linear())
    model.register_module("norm", None)
    assert chosen(model, target_modules=".*") == {"q"}


def test_a_path_of_names_is_whole_too() -> None:
    layers = [Group(query=linear()) for _ in range(2)]
    model = Group(bar=nn.ModuleList(layers[:1]), foo_bar=nn.ModuleList(layers[1:]))
    assert chosen(model, target_modules=["bar.0.query"]) == {"bar.0.query"}


def test_a_shared_module_is_one_site_with_all_its_paths() -> None:
    shared = linear()
    model = Group(a=Group(q=shared), b=Group(v=shared), c=linear())
    assert chosen(model, target_modules=["v", "c"]) == {"a.q", "b.v", "c"}
    assert chosen(model, target_modules=["v", "c"], exclude_modules=["q"]) == {"c"}
    found = choice(model, rank_pattern={"q": 2, "b.v": 4})
    assert [found.params_of(site).r for site in found.targets] == [4, 8]


def test_defaults_stand_for_what_is_none() -> None:
    model = Group(q=linear(), v=linear())
    found = choice(model, {"target_modules": ["q"], "r": 2})
    assert [site.path for site in found.targets] == ["q"]
    assert found.params.target_modules == ["q"]
    assert found.params.r == 8
    assert [
        s.path for s in choice(model, {"target_modules": ["q"]}, target_modules=["v"]).targets
    ] == ["v"]
    clash = choice(model, {"target_modules": "q"}, layers_to_transform=0).faults
    assert "the architecture's default does not fit" in about(clash, "target_modules")[0]


def test_an_empty_list_is_refused_unless_something_else_is_trained() -> None:
    model = Group(q=linear(), e=nn.Embedding(3, 2))
    assert fault(model, target_modules=[]) == (
        "peft.target_modules: is empty, so nothing would be trained"
    )
    assert chosen(model, target_modules=[], modules_to_save=["q"]) == set()
    assert chosen(model, target_modules=[], trainable_token_indices=[1]) == set()
    assert chosen(model, target_modules=[], target_parameters=["q.weight"]) == set()


def test_every_unmatched_entry_is_named_with_what_is_near() -> None:
    model = Group(layers=nn.ModuleList([Group(q_proj=linear(), v_proj=linear())]))
    found = choice(
        model, target_modules=["q_prj", "v_proj", "1.q_proj"], exclude_modules=["nope", "o_proj"]
    )
    assert found.faults == [
        "peft.target_modules: no module is called 'q_prj'; did you mean q_proj or v_proj?",
        "peft.target_modules: no module is called '1.q_proj'; did you mean 0.q_proj or 0.v_proj?",
    ]
    assert found.warnings == [
        "peft.exclude_modules: no module is called 'nope'",
        "peft.exclude_modules: no module is called 'o_proj'; did you mean v_proj or q_proj?",
    ]


def test_near_names_do_not_repeat_for_every_block() -> None:
    told = fault(decoder(), target_modules=["layers.1.self_attn.q_prj"])
    assert "did you mean layers.0.self_attn.q_proj or layers.0.self_attn.v_proj" in told
    assert told.count("q_proj") == 1


def test_of_very_many_unmatched_entries_the_last_ones_are_only_named() -> None:
    told = fault(Group(q=linear()), target_modules=[f"nope{i}" for i in range(30)])
    assert told.count("no module is called") == 21
    assert told.endswith("'nope28', 'nope29'")


def test_a_string_that_is_no_whole_path_is_explained() -> None:
    model = Group(a=Group(q_proj=linear()))
    told = fault(model, target_modules="q_proj")
    assert "regular expression for a whole path" in told
    assert "[q_proj]" in told
    assert r"'.*\\.(q.*|v.*)' would match" in fault(model, target_modules="q.*|v.*")
    assert "did you mean a.q_proj?" in fault(model, target_modules="a.q_prj")
    assert fault(model, target_modules="x.*") == (
        "peft.target_modules: 'x.*' matches no module; a string is a regular expression for a "
        "whole path"
    )


@pytest.mark.parametrize("typo", ["all_linear", "all-lineer", "All-Linear "])
def test_a_misspelt_all_linear_is_told(typo: str) -> None:
    found = choose(Sites(Group(q=linear())), PeftParams(target_modules=typo), {}, {})
    assert found.faults == [
        f"peft.target_modules: {typo!r} matches no module; did you mean all-linear?"
    ]


def test_a_regular_expression_in_a_list_is_explained() -> None:
    told = fault(Group(q_proj=linear()), target_modules=["x(y|z)"])
    assert told.endswith("what is in a list is a name, and a regular expression is a string")


def test_a_parameter_under_the_targets_is_explained() -> None:
    model = Group(experts=Group(gate_up=torch.ones(2, 2, 2)))
    assert fault(model, target_modules=["experts.gate_up"]) == (
        "peft.target_modules: 'experts.gate_up' is a parameter and no module; see target_parameters"
    )


def test_nothing_left_is_one_fault_that_tells_why() -> None:
    model = Group(a=linear(), b=linear(), layers=nn.ModuleList([Group(c=linear())]))
    assert fault(model, target_modules=["a"], exclude_modules=["a"]) == (
        "peft.target_modules: all that 'a' matches is excluded by exclude_modules (['a'])"
    )
    assert "no module is called 'zebra'" in fault(model, target_modules=["zebra"])
    both = fault(model, target_modules=["a", "zebra"], exclude_modules=["a"])
    assert both == (
        "peft.target_modules: no module is called 'zebra'; all that 'a' matches is excluded by "
        "exclude_modules (['a'])"
    )
    assert fault(model, target_modules=["c"], layers_to_transform=[3]) == (
        "peft.target_modules: all that 'c' matches is in none of the blocks of "
        "layers_to_transform ([3])"
    )
    inside = fault(model, target_modules=["0.c"], modules_to_save=["layers.0"])
    assert inside.endswith("all that '0.c' matches is inside a module that is trained whole")
    assert "no layer that all-linear means" in fault(Group(a=nn.LayerNorm(2)))
    assert "excluded" in fault(Group(a=linear()), exclude_modules=".*")


def test_an_entry_that_is_all_excluded_is_no_fault_while_others_are_left() -> None:
    model = Group(a=linear(), b=linear())
    assert chosen(model, target_modules=["a", "b"], exclude_modules=["a"]) == {"b"}


def test_inside_an_adapter_layer_nothing_is_matched() -> None:
    model = Group(o_proj=AdapterLayer(Group(o_proj=linear())), q=linear())
    model.o_proj.lora_A = nn.ModuleDict({"x": linear()})
    assert chosen(model, target_modules="o_proj.*") == {"o_proj"}
    assert chosen(model) == {"q"}


def test_what_is_below_a_module_whose_own_parameter_is_adapted_is_matched() -> None:
    mlp = Group(gate_up=torch.ones(2, 2), down=linear())
    model = Group(mlp=ParameterLayer(ParameterLayer(mlp, "gate_up"), "gate_up"))
    assert chosen(model) == {"mlp.down"}
    (site,) = choice(model).targets
    assert site.places == [(mlp, "down")]
    found = choice(model, target_modules=[], target_parameters=["mlp.gate_up"])
    assert [(s.path, name) for s, name in found.parameters] == [("mlp", "gate_up")]


def test_an_adapted_layer_is_matched_again() -> None:
    model = Group(q=AdapterLayer(linear()), v=linear())
    assert chosen(model) == {"q", "v"}


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize("wrap", [compiled, checkpoint_wrapper])
def test_wrappers_leave_no_trace_in_paths(wrap: object) -> None:
    model = Group(layers=nn.ModuleList(wrap(Group(q=linear())) for _ in range(2)))
    assert chosen(model, target_modules=["layers.1.q"]) == {"layers.1.q"}
    assert chosen(wrap(model), target_modules=r"layers\.0\.q") == {"layers.0.q"}


def test_a_layer_takes_the_place_of_what_was_compiled_and_not_of_a_checkpointed_wrapper() -> None:
    q, v = linear(), linear()
    model = Group(q=compiled(q), v=checkpoint_wrapper(v))
    outer, inner = choice(model).targets
    assert outer.module is q
    assert outer.places == [(model, "q")]
    assert inner.module is v
    assert inner.places == [(model.v, "_checkpoint_wrapped_module")]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"target_modules": "("}, r"target_modules: '\(' is not a regular expression"),
        ({"exclude_modules": "["}, "exclude_modules: '\\[' is not a regular expression"),
        ({"target_modules": ["q", ""]}, "target_modules: a list holds names"),
        ({"exclude_modules": [3]}, "exclude_modules: a list holds names"),
        ({"target_modules": ["all-linear"]}, "all-linear stands alone"),
    ],
)
def test_rules_that_mean_nothing_are_refused(rules: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PeftParams(**rules)


def test_matching_does_not_depend_on_the_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 2), nn.Linear(2, 5))
    assert chosen(model) == {"1"}


# All linear layers


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("word", ["all-linear", "All-Linear"])
def test_all_linear_leaves_out_the_output_head(word: str, blocks: int) -> None:
    def block() -> nn.Module:
        wide = nn.Linear(4, 11)  # as wide as the vocabulary, by chance
        return Group(up=wide, norm=nn.LayerNorm(4), down=nn.Linear(11, 4))

    model = Group(
        tokens=nn.Embedding(11, 4),
        blocks=nn.ModuleList(block() for _ in range(blocks)),
        head=nn.Linear(4, 11),
    )
    inside = {f"blocks.{i}.{name}" for i in range(blocks) for name in ("up", "down")}
    assert chosen(model, target_modules=word) == inside


def test_a_tied_head_is_a_head_wherever_it_is() -> None:
    embedding, head, other = nn.Embedding(11, 4), nn.Linear(4, 11), nn.Linear(4, 4)
    head.weight = embedding.weight
    model = Group(blocks=nn.ModuleList([Group(head=head, other=other)]), tokens=embedding)
    assert chosen(model) == {"blocks.0.other"}


def test_heads_in_a_list_are_heads_and_blocks_in_a_sequence_are_blocks() -> None:
    blocks = nn.Sequential(*(Group(up=nn.Linear(4, 11)) for _ in range(2)))
    model = Group(
        tokens=nn.Embedding(11, 4),
        trunk=blocks,
        heads=nn.ModuleList([nn.Linear(4, 11), nn.Linear(4, 5)]),
        tail=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 11)),
        wrapped=nn.Sequential(Group(head=nn.Linear(4, 11))),
    )
    assert chosen(model) == {"trunk.0.up", "trunk.1.up", "heads.1", "tail.0"}


def test_an_embedding_in_a_block_makes_no_head() -> None:
    block = Group(positions=nn.Embedding(32, 2), q=linear())
    model = Group(blocks=nn.ModuleList([block]), out=nn.Linear(2, 32))
    assert chosen(model) == {"blocks.0.q", "out"}


class Told(Group):
    """A model that says which its embeddings are."""

    def get_output_embeddings(self) -> nn.Module | None:
        return self._modules.get("made")

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens


def test_a_model_that_says_which_its_head_is_is_heeded() -> None:
    parts = {"tokens": nn.Embedding(11, 4), "same": nn.Linear(4, 11), "q": nn.Linear(4, 4)}
    assert chosen(Told(**parts, made=nn.Linear(4, 64))) == {"same", "q"}
    assert chosen(Told(**parts)) == {"same", "q"}

    class Shy(Told):
        def get_output_embeddings(self) -> nn.Module:
            raise NotImplementedError

    assert chosen(Shy(**parts)) == {"q"}


def test_all_linear_has_gpt2s_own_kind_of_linear_layer() -> None:
    class Conv1D(nn.Module):
        def __init__(self, nf: int, nx: int) -> None:
            super().__init__()
            self.nf, self.weight = nf, nn.Parameter(torch.empty(nx, nf))

    class Other(Conv1D):
        pass

    assert chosen(Group(x=Conv1D(2, 2), y=linear())) == {"y"}
    Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"
    model = Group(e=nn.Embedding(7, 2), x=Conv1D(2, 2), y=Other(4, 2), head=Conv1D(7, 2))
    assert chosen(model) == {"x", "y"}


def test_all_linear_leaves_out_what_attention_never_calls() -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    assert chosen(model) == {"linear1", "linear2"}


def test_without_embeddings_there_is_no_head() -> None:
    assert chosen(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))) == {"0", "2"}


def test_all_linear_leaves_out_what_is_trained_otherwise() -> None:
    model = Group(q=linear(), head=linear(), lm_head=Group(out=linear()))
    assert chosen(model, modules_to_save=["head"]) == {"q", "lm_head.out"}
    assert chosen(model, modules_to_save=["lm_head"]) == {"q", "head"}


def test_a_module_of_a_linear_layers_name_that_is_none_is_not_chosen() -> None:
    model = Group(a=Group(proj=linear()), b=Group(proj=nn.LayerNorm(2)))
    assert chosen(model) == {"a.proj"}


# Blocks


def test_the_first_number_is_the_blocks_and_never_an_experts() -> None:
    model = decoder()
    w1 = {"model.layers.1.mlp.experts.0.w1", "model.layers.1.mlp.experts.1.w1"}
    assert chosen(model, target_modules=["w1"], layers_to_transform=1) == w1
    in_layers = {"layers_to_transform": [1], "layers_pattern": "layers"}
    assert chosen(model, target_modules=["w1"], **in_layers) == w1
    in_experts = {"layers_to_transform": [1], "layers_pattern": ["mlp.experts"]}
    assert chosen(model, target_modules=["w1"], **in_experts) == {
        f"model.layers.{i}.mlp.experts.1.w1" for i in range(3)
    }


@pytest.mark.parametrize("pattern", [None, "layers", ["layers"]])
def test_block_zero_and_a_list_at_the_root_count(pattern: object) -> None:
    model = Group(layers=nn.ModuleList(Group(q=linear()) for _ in range(2)))
    rules = {"layers_to_transform": 0, "layers_pattern": pattern}
    assert chosen(model, target_modules=["q"], **rules) == {"layers.0.q"}
    assert chosen(model, target_modules=["q"], **{**rules, "layers_to_transform": [0]}) == {
        "layers.0.q"
    }


def test_a_list_of_blocks_has_a_whole_name() -> None:
    one, other = (nn.ModuleList([Group(q=linear())]) for _ in range(2))
    model = Group(layers=one, my_layers=other)
    found = choice(model, target_modules=["q"], layers_to_transform=0, layers_pattern="layers")
    assert [site.path for site in found.targets] == ["layers.0.q"]
    assert found.warnings == [
        "peft.layers_to_transform: my_layers.0.q: in no numbered block, and so without an adapter"
    ]


def test_names_that_are_exact_are_filtered_too() -> None:
    model = decoder()
    names = ["model.layers.0.self_attn.q_proj", "model.layers.2.self_attn.q_proj"]
    found = choice(model, target_modules=names, layers_to_transform=[2])
    assert [site.path for site in found.targets] == names[1:]
    assert found.warnings == [
        f"peft.target_modules: all that {names[0]!r} matches is in none of the blocks of "
        "layers_to_transform ([2])"
    ]


def test_targets_without_a_number_vanish_with_a_warning() -> None:
    found = choice(decoder(), target_modules=["q_proj", "lm_head"], layers_to_transform=[0])
    assert [site.path for site in found.targets] == ["model.layers.0.self_attn.q_proj"]
    assert (
        "peft.layers_to_transform: lm_head: in no numbered block, and so without an adapter"
        in found.warnings
    )


def test_a_shared_target_is_in_a_block_if_one_of_its_paths_is() -> None:
    shared = linear()
    model = Group(out=shared, layers=nn.ModuleList([Group(out=shared), Group(out=linear())]))
    assert chosen(model, target_modules=["out"], layers_to_transform=0) == {"out", "layers.0.out"}


def test_an_empty_list_of_blocks_is_no_filter() -> None:
    assert len(chosen(decoder(), target_modules=["q_proj"], layers_to_transform=[])) == 3


def test_numbers_and_lists_of_no_block_are_faults() -> None:
    model = decoder()
    assert fault(model, target_modules=["q_proj"], layers_to_transform=[0, 7, -1]) == (
        "peft.layers_to_transform: no target is in block -1, 7; they are from 0 to 2"
    )
    told = faults(
        model, target_modules=["q_proj"], layers_to_transform=0, layers_pattern=["layers", "layer"]
    )
    assert told == [
        "peft.layers_pattern: no list of blocks is called 'layer'; did you mean layers?"
    ]


def test_all_linear_goes_with_blocks() -> None:
    found = choice(decoder(experts=0), layers_to_transform=[1])
    assert {site.path for site in found.targets} == {
        f"model.layers.1.{name}" for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate")
    }


# Modules that are trained whole


def saved(model: nn.Module, **fields: object) -> list[str]:
    found = choice(model, **{"target_modules": [], **fields})
    assert found.faults == []
    assert found.warnings == []
    return [site.path for site in found.saved]


def test_a_saved_module_has_a_whole_name() -> None:
    model = Group(head=linear(), lm_head=linear(), classifier=linear(), classifier2=linear())
    assert saved(model, modules_to_save=["head"]) == ["head"]
    assert saved(model, modules_to_save=["classifier"]) == ["classifier"]
    assert fault(model, target_modules=[], modules_to_save=["ead"]) == (
        "peft.modules_to_save: no module is called 'ead'; did you mean head or lm_head?"
    )


def test_inside_a_saved_module_nothing_is_a_target() -> None:
    model = Group(head=Group(q=linear()), head2=Group(q=linear()))
    assert chosen(model, target_modules=["q"], modules_to_save=["head"]) == {"head2.q"}
    assert chosen(model, modules_to_save=["head"]) == {"head2.q"}
    found = choice(model, target_modules=["head2.q", "head.q"], modules_to_save=["head"])
    assert [site.path for site in found.targets] == ["head2.q"]
    assert found.warnings == [
        "peft.target_modules: all that 'head.q' matches is inside a module that is trained whole"
    ]


def test_a_module_that_is_used_inside_a_saved_one_too_is_no_target() -> None:
    shared = linear()
    model = Group(head=Group(q=shared), trunk=Group(q=shared), v=linear())
    assert chosen(model, target_modules="trunk.q|v", modules_to_save=["head"]) == {"v"}


def test_a_saved_module_inside_a_saved_one_is_trained_with_it() -> None:
    model = Group(head=Group(out=linear()), tail=Group(out=linear()))
    assert saved(model, modules_to_save=["out", "head"]) == ["head", "tail.out"]


def test_a_target_that_is_saved_is_a_fault() -> None:
    model = Group(q=linear(), head=linear())
    told = fault(model, target_modules=["q", "head"], modules_to_save=["head"])
    assert told == (
        "peft.target_modules: head is trained whole (modules_to_save or task_type); leave it out "
        "there, or exclude it here"
    )
    excluded = {"target_modules": ["q", "head"], "exclude_modules": ["head"]}
    assert chosen(model, **excluded, modules_to_save=["head"]) == {"q"}


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.ModuleDict])
def test_a_module_that_is_never_called_cannot_be_saved(kind: type[nn.Module]) -> None:
    model = Group(q=linear(), heads=kind())
    assert fault(model, target_modules=["q"], modules_to_save=["heads"]) == (
        f"peft.modules_to_save: heads is an nn.{kind.__name__}, which is never called; name what "
        "is in it"
    )
    attention = Group(attention=nn.MultiheadAttention(2, 1), q=linear())
    assert "reads its weight" in fault(
        attention, target_modules=["q"], modules_to_save=["out_proj"]
    )


def test_a_name_inside_an_adapter_layer_is_not_saved() -> None:
    layer = AdapterLayer(linear())
    layer.lora_A = nn.ModuleDict({"out": linear()})
    model = Group(q=layer, v=linear())
    assert "no module is called 'out'" in fault(model, modules_to_save=["out"])


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("SEQ_CLS", "score"),
        ("SEQ_CLS", "classifier"),
        ("TOKEN_CLS", "score"),
        ("TOKEN_CLS", "classifier"),
        ("QUESTION_ANS", "qa_outputs"),
    ],
)
def test_a_tasks_head_is_saved(task: str, name: str) -> None:
    blocks = nn.ModuleList([Group(**{name: linear()})])
    model = Group(q=linear(), blocks=blocks, **{name: linear()})
    assert saved(model, task_type=task) == [name]
    assert chosen(model, task_type=task) == {"q", f"blocks.0.{name}"}
    assert saved(model, task_type=task, modules_to_save=["q"]) == ["q", name]
    both = ["classifier", "score"] if task != "QUESTION_ANS" else [name]
    assert name in saved(model, task_type=task, modules_to_save=both)


@pytest.mark.parametrize("task", ["CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION", None])
def test_other_tasks_save_nothing(task: str | None) -> None:
    assert saved(Group(q=linear(), score=linear()), target_modules=["q"], task_type=task) == []


def test_a_task_whose_head_is_not_there_is_a_warning() -> None:
    model = Group(q=linear(), top=linear())
    assert choice(model, target_modules=["q"], task_type="SEQ_CLS").warnings == [
        "peft.task_type: SEQ_CLS trains the model's head whole, but no module is called "
        "classifier or score; name the head under modules_to_save"
    ]
    rules = {"target_modules": ["q"], "task_type": "SEQ_CLS", "modules_to_save": ["top"]}
    assert chosen(model, **rules) == {"q"}


# Parameters


def experts() -> nn.Module:
    def mlp() -> nn.Module:
        own = Group(gate_up=torch.ones(2, 3, 4), down=torch.ones(3, 4), bias=torch.ones(3))
        return Group(experts=own)

    return Group(
        layers=nn.ModuleList(mlp() for _ in range(2)),
        my_down=torch.ones(2, 2),
        q=linear(),
    )


def parameters(model: nn.Module, **fields: object) -> list[str]:
    found = choice(model, **{"target_modules": [], **fields})
    assert found.faults == []
    return [f"{site.path}.{name}" for site, name in found.parameters]


def test_parameters_are_matched_by_the_same_rules() -> None:
    model = experts()
    down = ["layers.0.experts.down", "layers.1.experts.down"]
    assert parameters(model, target_parameters=["experts.down"]) == down
    assert parameters(model, target_parameters=["down"]) == down
    assert parameters(model, target_parameters=["layers.1.experts.down"]) == down[1:]
    assert parameters(model, target_parameters=r".*0\.experts\..*") == [
        "layers.0.experts.gate_up",
        down[0],
    ]
    assert parameters(model, target_parameters=["down"], exclude_modules=["0.experts"]) == down[1:]
    assert parameters(model, target_parameters=["down"], layers_to_transform=0) == down[:1]


def test_parameters_alone_are_no_reason_for_targets() -> None:
    assert chosen(experts(), target_parameters=["experts.down"]) == set()
    assert chosen(experts(), target_parameters=["experts.down"], target_modules=["q"]) == {"q"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_down", "my_down is the model's own; only those of the modules in it"),
        ("experts.bias", "layers.0.experts.bias has fewer than two dimensions"),
        ("experts.dwn", "no parameter is called 'experts.dwn'; did you mean experts.down"),
        ("weights", "no parameter is called 'weights'; did you mean weight?"),
    ],
)
def test_parameters_that_can_have_no_adapter_are_faults(name: str, message: str) -> None:
    told = fault(experts(), target_parameters=[name])
    assert told.startswith(f"peft.target_parameters: {message}")
    assert len(faults(experts(), target_parameters=[name, "experts.down"])) == 1


def test_a_module_and_its_own_parameter_cannot_both_have_an_adapter() -> None:
    model = Group(q=linear(), head=linear())
    told = fault(model, target_modules=["q"], target_parameters=["q.weight"])
    assert told.startswith("peft.target_parameters: q.weight: its module is one of target_modules")
    told = fault(model, target_modules=[], target_parameters=["q.weight"], modules_to_save=["q"])
    assert told.startswith("peft.target_parameters: q is trained whole")


def test_patterns_fit_parameters_by_their_paths() -> None:
    model = experts()
    found = choice(
        model, target_parameters=["experts.down", "gate_up"], rank_pattern={"1.experts.down": 2}
    )
    ranks = {f"{s.path}.{n}": found.params_of(s, n).r for s, n in found.parameters}
    assert ranks == {
        "layers.0.experts.gate_up": 8,
        "layers.0.experts.down": 8,
        "layers.1.experts.gate_up": 8,
        "layers.1.experts.down": 2,
    }


# Rows of embeddings


def tokens(model: nn.Module, rows: object) -> list[tuple[str, list[int]]]:
    found = choice(model, target_modules=[], trainable_token_indices=rows)
    assert found.faults == []
    return [(site.path, rows) for site, rows in found.tokens]


def rows_fault(model: nn.Module, rows: object, **fields: object) -> str:
    told = fault(model, **{"target_modules": [], "trainable_token_indices": rows, **fields})
    return told.removeprefix("peft.trainable_token_indices: ")


def test_rows_are_the_input_embeddings() -> None:
    assert tokens(decoder(), [3, 1]) == [("model.tokens", [3, 1])]
    parts = {
        "positions": nn.Embedding(64, 2),
        "types": nn.Embedding(2, 2),
        "tokens": nn.Embedding(9, 2),
    }
    assert tokens(Group(**parts, head=nn.Linear(2, 9)), [3]) == [("tokens", [3])]
    assert tokens(Told(**parts), [3]) == [("tokens", [3])]
    assert rows_fault(Group(**parts), [3]) == (
        "which embedding is meant cannot be told from the model (positions, types, tokens); name "
        "it: {name: rows}"
    )
    assert "the model has no nn.Embedding" in rows_fault(Group(q=linear()), [3])


def test_rows_by_name_follow_the_rules() -> None:
    model = Group(e=nn.Embedding(5, 2), my_e=nn.Embedding(5, 2), a=Group(e=nn.Embedding(5, 2)))
    assert tokens(model, {"e": [1]}) == [("e", [1]), ("a.e", [1])]
    assert tokens(model, {"a.e": [1], "my_e": [0, 2]}) == [("a.e", [1]), ("my_e", [0, 2])]
    assert rows_fault(model, {"f": [1]}) == "no module is called 'f'"
    assert rows_fault(model, {"e": [1], "a.e": [2]}) == "a.e is what two of the names mean"


def test_rows_that_are_not_there_or_there_twice_are_faults() -> None:
    model = decoder()
    assert rows_fault(model, [0, 11, -1]) == "model.tokens has the rows 0 to 10, got 11, -1"
    assert rows_fault(model, [2, 3, 2]) == "model.tokens has each row once, got 2 more than once"
    assert rows_fault(model, {"layers.0": [1]}) == "model.layers.0 has no weight with rows"


def test_a_module_is_trained_in_one_way_only() -> None:
    model = Group(tokens=nn.Embedding(5, 2), q=linear())
    both = "tokens is trained whole already (modules_to_save)"
    assert rows_fault(model, [1], modules_to_save=["tokens"]) == both
    told = faults(model, target_modules=["tokens"], trainable_token_indices=[1])
    assert told == [
        "peft.target_modules: tokens has rows that are trained (trainable_token_indices); leave "
        "it out there, or exclude it here"
    ]
    assert chosen(model, trainable_token_indices={"q": [0]}, target_modules=["tokens"]) == {
        "tokens"
    }
    assert "no layer that all-linear means" in fault(model, trainable_token_indices={"q": [0]})

"""Which modules the rules choose, against a plain reference; and what is said when none is."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from core_plugin.adapters.matching import select
from core_plugin.adapters.tree import sites
from core_plugin.types.peft import PeftParams

NAMES = ["a", "b", "q", "q_proj", "my_q", "0", "1"]


class Group(nn.Module):
    """A container with children by name."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


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


def chosen(model: nn.Module, **rules: object) -> set[str]:
    found, faults = select(sites(model), PeftParams(**rules))
    assert not faults
    return {path for site in found for path in site.paths}


def faults(model: nn.Module, **rules: object) -> list[str]:
    return select(sites(model), PeftParams(**rules))[1]


def fits(rule: str | list[str] | None, path: str) -> bool:
    """The rule as it is written down, without any cleverness."""
    if isinstance(rule, str):
        return re.fullmatch(rule, path) is not None
    return any(path == entry or path.endswith("." + entry) for entry in rule or [])


paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map(".".join)
patterns = st.sampled_from([r".*q", r"a\.b", r"(a|b)\..*", r".*\.\d+\..*", "q", r".*(?<!_)q.*"])
entries = st.lists(st.sampled_from(NAMES), min_size=1, max_size=2).map(".".join)
rules = st.one_of(patterns, st.lists(entries, min_size=1, max_size=3))


@given(st.lists(paths, min_size=1, max_size=8), rules, st.one_of(st.none(), rules))
def test_rules_choose_as_written(
    written: list[str], target: str | list[str], exclude: str | list[str] | None
) -> None:
    model = tree(written)
    every = [name for name, _ in model.named_modules() if name]
    found, problems = select(
        sites(model), PeftParams(target_modules=target, exclude_modules=exclude)
    )
    expected = [p for p in every if fits(target, p) and not fits(exclude, p)]
    assert [site.path for site in found] == expected
    each = [([r] if isinstance(r, str) else r or []) for r in (target, exclude)]
    as_rule = [target, exclude]
    unused = sum(
        not any(fits(entry if isinstance(rule, str) else [entry], p) for p in every)
        for entries, rule in zip(each, as_rule, strict=True)
        for entry in dict.fromkeys(entries)
    )
    assert len([p for p in problems if "excluded by" not in p]) == unused
    assert bool(problems) == (unused > 0 or not expected)


def test_a_name_is_whole() -> None:
    model = Group(q_proj=nn.Linear(2, 2), my_q_proj=nn.Linear(2, 2))
    assert chosen(model, target_modules=["q_proj"]) == {"q_proj"}
    assert chosen(model, target_modules=".*q_proj") == {"q_proj", "my_q_proj"}
    assert chosen(model, target_modules=".*", exclude_modules=["q_proj"]) == {"my_q_proj"}


def test_a_path_of_names_is_whole_too() -> None:
    model = Group(a=Group(q=nn.Linear(2, 2)), my_a=Group(q=nn.Linear(2, 2)))
    assert chosen(model, target_modules=["a.q"]) == {"a.q"}


def test_a_shared_module_is_one_site_with_all_its_paths() -> None:
    shared = nn.Linear(2, 2)
    model = Group(a=Group(q=shared), b=Group(v=shared), c=nn.Linear(2, 2))
    assert chosen(model, target_modules=["v", "c"]) == {"a.q", "b.v", "c"}
    assert chosen(model, target_modules=["v", "c"], exclude_modules=["q"]) == {"c"}


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("word", ["all-linear", "All-Linear"])
def test_all_linear_leaves_out_the_output_head(word: str, blocks: int) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 11)  # as wide as the vocabulary, by chance
            self.norm = nn.LayerNorm(4)
            self.down = nn.Linear(11, 4)

    model = Group(
        tokens=nn.Embedding(11, 4),
        blocks=nn.ModuleList(Block() for _ in range(blocks)),
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


def test_all_linear_leaves_out_what_attention_never_calls() -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    assert chosen(model) == {"linear1", "linear2"}


def test_without_embeddings_there_is_no_head() -> None:
    assert chosen(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))) == {"0", "2"}


def test_every_unmatched_entry_is_named_with_what_is_near() -> None:
    model = Group(layers=nn.ModuleList([Group(q_proj=nn.Linear(2, 2), v_proj=nn.Linear(2, 2))]))
    wrong = faults(model, target_modules=["q_prj", "v_proj", "1.q_proj"], exclude_modules=["nope"])
    assert wrong == [
        "peft.target_modules: no module is called 'q_prj'; did you mean q_proj or v_proj?",
        "peft.target_modules: no module is called '1.q_proj'; did you mean 0.q_proj or 0.v_proj?",
        "peft.exclude_modules: no module is called 'nope'",
    ]


def test_a_bare_name_as_a_string_is_explained() -> None:
    model = Group(a=Group(q_proj=nn.Linear(2, 2)))
    (wrong,) = faults(model, target_modules="q_proj")
    assert "regular expression for a whole path" in wrong
    assert "[q_proj]" in wrong


def test_nothing_left_tells_apart_why() -> None:
    model = Group(a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    (excluded,) = faults(model, target_modules=["a"], exclude_modules=["a"])
    assert "all that 'a' matches is excluded by exclude_modules (['a'])" in excluded
    (unknown,) = faults(model, target_modules=["zebra"])
    assert "no module is called 'zebra'" in unknown
    both = faults(model, target_modules=["a", "zebra"], exclude_modules=["a"])
    assert len(both) == 2
    assert "zebra" in both[0]
    assert "excluded" in both[1]
    (none,) = faults(Group(a=nn.LayerNorm(2)))
    assert "no nn.Linear" in none


def test_an_entry_that_is_all_excluded_is_no_fault_while_others_are_left() -> None:
    model = Group(a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    assert chosen(model, target_modules=["a", "b"], exclude_modules=["a"]) == {"b"}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"target_modules": "("}, r"target_modules: '\(' is not a regular expression"),
        ({"exclude_modules": "["}, "exclude_modules: '\\[' is not a regular expression"),
        ({"target_modules": []}, "target_modules is empty"),
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

"""How ``core-plugin info`` shows parameters."""

import json

MODULE = '''\
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Callable, Literal, Optional

@dataclass(frozen=True)
class Leaf:
    weight: Annotated[float, "of it"]
    next: Optional[Branch] = None

@dataclass(frozen=True)
class Branch:
    leaves: dict[str, Leaf] = field(default_factory=dict)

@dataclass
class Params:
    kind: Literal["a", "b"] | tuple[int, ...] = "a"
    where: Path | None = None
    branches: list[Branch] = field(default_factory=list)
    leaf: Leaf = Leaf(1.0)

def optimizer(model, params: Params):
    """Steps.

    Args:
        model: the module.

    Returns:
        An optimizer.
    """
'''


def shown(environment, command_line) -> str:
    environment.site().add("nested", optimizer="nested = m:optimizer", modules={"m.py": MODULE})
    code, out, _ = command_line("info", "nested")
    assert code == 0
    return out


def test_the_fields_of_nested_parameters_have_rows_with_the_path_of_an_override(
    environment, command_line
) -> None:
    lines = [line.split() for line in shown(environment, command_line).splitlines()]
    table = lines[lines.index(["parameter", "type", "default"]) + 1 :]
    assert [row[0] for row in table] == [
        "kind",
        "where",
        "branches",
        "branches.0.leaves",
        "branches.0.leaves.KEY.weight",
        "branches.0.leaves.KEY.next",  # and no further: it holds a Branch again
        "leaf",
        "leaf.weight",
        "leaf.next",
        "leaf.next.leaves",
    ]
    code, out, _ = command_line("info", "nested", "--json")
    types = {field["name"]: field["type"] for field in json.loads(out)[0]["params"]}
    assert code == 0
    assert types["kind"] == "'a' | 'b' | tuple[int, ...]"
    assert types["where"] == "Path | None"
    assert types["branches"] == "list[Branch]"
    assert types["branches.0.leaves"] == "dict[str, Leaf]"
    assert types["leaf.weight"] == "float"


def test_what_only_a_caller_of_the_function_needs_is_left_out(environment, command_line) -> None:
    out = shown(environment, command_line)
    assert "Steps." in out
    assert "Args:" not in out
    assert "An optimizer." not in out

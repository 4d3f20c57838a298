"""A run's YAML as plain data: reading it with the place of every value, overrides, writing it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from core_plugin.errors import ConfigError

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator, Mapping

    from core_plugin.params import Path


class _Constructor(SafeConstructor):
    """That of YAML 1.2's core schema, which has no dates: a date is a string."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    return yaml


def read(path: pathlib.Path) -> tuple[dict[str, Any], dict[Path, str]]:
    """The mapping in a YAML 1.2 file, and the place (``file:line``) of every value in it.

    Raises:
        ConfigError: It cannot be read, is no YAML, or is no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8 text: {error.reason}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        document = _own_copy(_yaml().load(text))
        node = _yaml().compose(text)
        lines = dict(_lines(node)) if isinstance(document, dict) else {}
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            f"{path}:{mark.line + 1 if mark else 1}: is not YAML: {_first_line(error.problem)}"
        ) from None
    except (YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: is not YAML: {_first_line(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply, or an anchor contains itself") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}:1: must hold a mapping, such as 'model: decoder'")
    return document, {part: f"{path}:{line}" for part, line in lines.items()}


def write(document: Mapping[str, Any], path: pathlib.Path) -> None:
    """Write plain data as YAML."""
    yaml = YAML()
    yaml.default_flow_style = False
    with path.open("w", encoding="utf-8") as file:
        yaml.dump(dict(document), file)


def override(document: dict[str, Any], places: dict[Path, str], text: str) -> None:
    """Set one value, as ``key.key=value`` says; the value is YAML.

    A part of a list is an index. A bare plugin name on the way becomes ``{name: ...}``.

    Raises:
        ConfigError: It is something else, or has no place in the document.
    """
    place = f"override {text!r}"
    key, equals, written = text.partition("=")
    *above, last = key.strip().split(".")
    if not equals or not all((*above, last)):
        raise ConfigError(f"{place}: write key=value, such as optimizer.lr=1e-3")
    try:
        value = _own_copy(_yaml().load(written)) if written.strip() else None
    except (YAMLError, ValueError) as error:
        problem = error.problem if isinstance(error, MarkedYAMLError) else error
        raise ConfigError(f"{place}: the value is not YAML: {_first_line(problem)}") from None
    container: Any = document
    path: Path = ()
    for part in above:
        container, index = _opened(container, part, place)
        path = (*path, index)
        places.setdefault(path, place)
    index = _index(container, last, place)
    container[index] = value
    path = (*path, index)
    for inside in [p for p in places if p[: len(path)] == path]:
        del places[inside]
    places[path] = place


def _opened(container: Any, part: str, place: str) -> tuple[Any, str | int]:
    """What is below a part, as something with parts of its own, and the part's index."""
    index = _index(container, part, place)
    child = container.get(index) if isinstance(container, dict) else container[index]
    if isinstance(child, str):
        child = {"name": child}
    if not isinstance(child, dict | list | None):
        raise ConfigError(f"{place}: {part} is {child!r}, which has no parts")
    container[index] = {} if child is None else child
    return container[index], index


def _index(container: Any, part: str, place: str) -> str | int:
    if isinstance(container, dict):
        return part
    if not part.isdecimal() or int(part) >= len(container):
        raise ConfigError(f"{place}: {part!r} is no index of a list of {len(container)}")
    return int(part)


def _own_copy(value: Any) -> Any:
    """A copy in which no part is there twice, as an anchor and its aliases are."""
    if isinstance(value, dict):
        return {key: _own_copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_own_copy(item) for item in value]
    return value


def _lines(node: Node, path: Path = ()) -> Iterator[tuple[Path, int]]:
    """The line of every value, from 1; that of a key where there is one."""
    yield path, node.start_mark.line + 1
    if isinstance(node, MappingNode):
        for key, value in node.value:
            if isinstance(key, ScalarNode):
                below = (*path, key.value)
                yield from _lines(value, below)
                yield below, key.start_mark.line + 1
    elif isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            yield from _lines(item, (*path, index))


def _first_line(problem: object) -> str:
    return str(problem).strip().partition("\n")[0]

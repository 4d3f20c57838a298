"""The cases for a plugin type, and what their markers say."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from core_plugin import document
from core_plugin.errors import ConfigError
from core_plugin.params import Origin, parse_params

TIMEOUT = 30.0
"""Seconds that a case may take, unless it says otherwise."""


@dataclass(frozen=True)
class Plan:
    """How a case is run, as its markers say."""

    name: str
    level: int
    capability: str | None
    ranks: int
    only: str | None
    timeout: float
    fresh: bool
    in_place: bool
    offline: bool

    @classmethod
    def of(cls, item: pytest.Function) -> Plan:
        """What the markers of a case say."""

        def argument(marker: str, default: Any) -> Any:
            found = item.get_closest_marker(marker)
            return found.args[0] if found else default

        return cls(
            name=case_name(item.path, item.name),
            level=argument("level", 0),
            capability=argument("requires", None),
            ranks=argument("ranks", 1),
            only=argument("only", None),
            timeout=argument("timeout_s", TIMEOUT),
            fresh=item.get_closest_marker("fresh") is not None,
            in_place=item.get_closest_marker("in_place") is not None,
            offline=item.get_closest_marker("offline") is not None,
        )


def case_name(file: Path, function: str) -> str:
    """What a case is called: the file's name and the function's, without ``test_``."""
    return f"{file.stem.removeprefix('test_')}/{function.removeprefix('test_')}"


PLAN = pytest.StashKey[Plan]()


class Suite:
    """The cases for a plugin type: the package ``core_plugin.testing.<type>``.

    Raises:
        ConfigError: There is no suite for the type.
    """

    def __init__(self, type_name: str) -> None:
        package = f"core_plugin.testing.{type_name}"
        if not type_name.isidentifier() or find_spec(package) is None:
            raise ConfigError(
                f"there is no conformance suite for plugins of the type {type_name!r}"
            )
        module = importlib.import_module(f"{package}.subject")
        self.package = package
        self.folder = Path(str(module.__file__)).parent
        self.files = sorted(self.folder.glob("test_*.py"))
        self.subject_type: Any = module.Subject

    def functions(self) -> Iterator[tuple[str, Any, dict[str, pytest.Mark]]]:
        """The cases by name: the function of each, and its markers."""
        for file in self.files:
            module = importlib.import_module(f"{self.package}.{file.stem}")
            of_file = getattr(module, "pytestmark", [])
            for name, function in vars(module).items():
                if name.startswith("test_") and inspect.isfunction(function):
                    own = getattr(function, "pytestmark", [])
                    marks = [*(of_file if isinstance(of_file, list) else [of_file]), *own]
                    marks = [mark if isinstance(mark, pytest.Mark) else mark.mark for mark in marks]
                    yield case_name(file, name), function, {mark.name: mark for mark in marks}

    def subject(self, name: str, texts: Sequence[str]) -> Any:
        """The plugin with the name, with parameters as ``key=value``.

        Raises:
            CorePluginError: There is no such plugin, or it has no such parameters.
        """
        route = self.subject_type.plugin_type(name)
        values: dict[str, Any] = {}
        for text in texts:
            document.override(values, {}, text)
        return self.subject_type(name, parse_params(values, route.params_type(), Origin(path=name)))

"""Where an error comes from that is no user's mistake: the plugin, and the place in its code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from core_plugin.config import PLUGIN_TYPES
from core_plugin.errors import CorePluginError
from core_plugin.plugin import Resolved

HINT = "run with --debug for the traceback"


class BugError(Exception):
    """What a rank raised that is no user's mistake. It can be sent to the other ranks.

    As the cause of another error it shows the traceback on that rank.
    """

    def __init__(self, told: str, shown: str) -> None:
        super().__init__(told, shown)
        self.told = told
        self._shown = shown

    @classmethod
    def of(cls, error: BaseException) -> BugError:
        """What stands for an error of this rank on the others."""
        return cls(told(error), "".join(traceback.format_exception(error)))

    def __str__(self) -> str:
        return f"\n{self._shown}"


def told(error: BaseException) -> str:
    """What is wrong, and where: ``file:line: optimizer 'x' of y 1.0: ZeroDivisionError: ...``.

    A user's mistake says that itself.
    """
    if isinstance(error, BugError):
        return error.told
    if isinstance(error, CorePluginError):
        return str(error)
    return f"{where(error)}: {type(error).__name__}: {error}"


def where(error: BaseException) -> str:
    """The innermost line of a plugin's code, and the plugin; or else the line alone.

    Where it may be one of several plugins of a package, all are named.
    """
    lines = list(_lines(error))
    for line in lines:
        if owners := _owners(line):
            return f"{line.place}: {_described(owners)}"
    return min(lines, key=lambda line: distance(line.module)).place if lines else ""


def distance(module: str) -> int:
    """How far a module's code is from what the user chose or wrote."""
    top = module.partition(".")[0]
    if top in ("torch", *sys.stdlib_module_names):
        return 2
    return int(top == "core_plugin" and not module.startswith("core_plugin.builtin."))


class _Line(NamedTuple):
    """A line that an error went through."""

    module: str
    function: str
    place: str
    """``file:line``"""


def _lines(error: BaseException) -> Iterator[_Line]:
    """The innermost first."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = frame.f_code
        module = frame.f_globals.get("__name__", "")
        yield _Line(module, code.co_qualname, f"{code.co_filename}:{number}")


def _owners(line: _Line) -> Sequence[Resolved]:
    """The loaded plugins whose code a line may be, as closely as its names tell."""
    package = _package(line.module)
    loaded = [plugin for t in PLUGIN_TYPES.values() for plugin in t.loaded()]
    owners = [p for p in loaded if _package(_module(p)) == package]
    in_module = [p for p in owners if _module(p) == line.module]
    of_object = [
        p
        for p in in_module
        if line.function.partition(".")[0] == getattr(p.implementation, "__qualname__", None)
    ]
    return of_object or in_module or owners


def _module(plugin: Resolved) -> str:
    return getattr(plugin.implementation, "__module__", "")


def _package(module: str) -> str:
    """What a plugin's code is in: its package, but of core's own plugins only the module."""
    top = module.partition(".")[0]
    return module if top == "core_plugin" else top


def _described(plugins: Sequence[Resolved]) -> str:
    """``optimizer 'x' or hook 'z' of y 1.0``."""
    names = dict.fromkeys(f"{type(p.route).type_name} {p.route.name!r}" for p in plugins)
    found = (p.registration.distribution for p in plugins)
    distributions = dict.fromkeys(f"{d.name} {d.version}" for d in found if d)
    return " of ".join(" or ".join(part) for part in (names, distributions) if part)

"""``core-plugin doctor``."""

import platform
from collections.abc import Iterator
from typing import Annotated

import importlib_metadata
import typer

from core_plugin import __version__, discovery, policy
from core_plugin.cli.arguments import Json
from core_plugin.cli.listing import state_of
from core_plugin.cli.output import print_json
from core_plugin.config import PLUGIN_TYPES
from core_plugin.discovery import Problem
from core_plugin.errors import CorePluginError, PluginConflictError
from core_plugin.params import near


def doctor(
    as_json: Json = False,
    load: Annotated[
        bool, typer.Option("--load", help="Import every plugin too, to see whether it loads.")
    ] = False,
) -> None:
    """Look for what is wrong with the installed plugins, and say how to mend it.

    Exits with 1 if there is anything.
    """
    problems = [
        *discovery.scan().problems,
        *_state_problems(),
        *_group_problems(),
        *(
            Problem("the environment", message, "correct the list")
            for message in policy.active().unknown_names()
        ),
        *(_load_problems() if load else ()),
    ]
    versions = {"core-plugin": __version__, "python": platform.python_version()}
    versions["torch"] = _version("torch")
    if as_json:
        print_json({"versions": versions, "problems": [vars(problem) for problem in problems]})
    else:
        print("  ".join(f"{name} {version}" for name, version in versions.items()))
        for problem in problems:
            print(f"\n{problem.location}\n  {problem.message}\n  fix: {problem.fix}")
        print(f"\nproblems: {len(problems)}")
    raise typer.Exit(1 if problems else 0)


def _version(name: str) -> str:
    try:
        return importlib_metadata.version(name)
    except importlib_metadata.PackageNotFoundError:
        return "not installed"


def _state_problems() -> Iterator[Problem]:
    for candidate in discovery.scan().candidates:
        state, reason = state_of(candidate)
        distribution = candidate.distribution
        fix = {
            "incompatible": f"install a version of {distribution.name} that fits",
            "conflict": f"write name: {candidate.qualified_name}, or uninstall one of them",
        }.get(state)
        if fix:
            message = f"{candidate.type_name} {candidate.name}: {state}: {reason}"
            yield Problem(distribution.location, message, fix)


def _group_problems() -> Iterator[Problem]:
    """What looks like a mistyped group: a package may have plugin types of its own."""
    for candidate in discovery.scan().candidates:
        type_name = candidate.type_name
        if type_name not in PLUGIN_TYPES and (close := near(type_name, PLUGIN_TYPES)):
            message = f"{candidate.name}: core-plugin has no plugin type {type_name}"
            yield Problem(candidate.distribution.location, message, f"did the author mean {close}?")


def _load_problems() -> Iterator[Problem]:
    for candidate in discovery.scan().candidates:
        if candidate.type_name not in PLUGIN_TYPES or state_of(candidate)[0] not in (
            "usable",
            "qualified",
        ):
            continue
        try:
            PLUGIN_TYPES[candidate.type_name](candidate.qualified_name).resolve()
        except CorePluginError as error:
            distribution = candidate.distribution
            conflict = isinstance(error, PluginConflictError)
            fix = (
                "uninstall one of them"
                if conflict
                else f"re-install or upgrade {distribution.name}"
            )
            yield Problem(distribution.location, str(error), fix)

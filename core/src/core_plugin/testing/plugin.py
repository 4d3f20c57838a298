"""The pytest plugin: ``pytest --core-plugin device:fake`` runs a suite against a plugin.

The suite of a type is the package ``core_plugin.testing.<type>``. Its cases are run in child
processes (:mod:`core_plugin.testing.processes`), each with a time limit.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from core_plugin.errors import ConfigError, CorePluginError

if TYPE_CHECKING:
    from core_plugin.testing.conformance import Conformance

MARKERS = (
    "level(number): the level that a conformance case belongs to",
    "requires(capability): what a plugin declares if it passes the case",
    "ranks(number): run in that many processes, which form a process group",
    "fresh: run in processes of its own, without a process group, in which nothing is set up",
    "only(kind): for plugins of that kind alone",
    "offline: needs no hardware",
    "in_place: run in pytest's own process",
    "timeout_s(seconds): the time limit of a case",
    "accelerator: a case of a device other than the CPU",
    "hardware: a case that needs the hardware",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("core-plugin", "conformance of core-plugin's plugins")
    group.addoption(
        "--core-plugin", action="append", metavar="TYPE:NAME", help="the plugin to test"
    )
    group.addoption(
        "--core-plugin-params",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a parameter of the plugin",
    )
    group.addoption(
        "--core-plugin-level", type=int, metavar="N", help="run the cases up to this level"
    )
    group.addoption(
        "--core-plugin-except",
        action="append",
        default=[],
        metavar="CASE=REASON",
        help="a case that may fail; the reason is shown in the report",
    )
    group.addoption("--core-plugin-report", type=Path, metavar="FILE", help="write a JSON report")


def pytest_configure(config: pytest.Config) -> None:
    """Set up the suite, if there is a plugin to test."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    asked = config.getoption("--core-plugin")
    if not asked:
        return
    if getattr(config.option, "numprocesses", None) or hasattr(config, "workerinput"):
        raise pytest.UsageError("--core-plugin: the suite has processes of its own; leave -n out")
    if len(asked) > 1:
        raise pytest.UsageError(f"--core-plugin: one plugin a run, not {', '.join(asked)}")
    try:
        conformance = _conformance(config, asked[0])
    except CorePluginError as error:
        raise pytest.UsageError(f"--core-plugin {asked[0]}: {error}") from error
    from core_plugin.testing import junit
    from core_plugin.testing.conformance import NAME

    config.pluginmanager.register(conformance, NAME)
    config.pluginmanager.register(junit)
    name = conformance.subject.name.rpartition(":")[2]
    config.addinivalue_line("markers", f"{name}: a conformance case of {asked[0]}")
    own = config.args if config.args_source == pytest.Config.ArgsSource.ARGS else []
    config.args = [*own, str(conformance.suite.folder)]


def _conformance(config: pytest.Config, plugin: str) -> Conformance:
    from core_plugin.testing.conformance import Conformance

    exceptions = {}
    for text in config.getoption("--core-plugin-except"):
        case, _, reason = text.partition("=")
        if not reason.strip():
            raise ConfigError(f"--core-plugin-except {text}: write CASE=REASON")
        exceptions[case] = reason
    return Conformance(
        plugin,
        config.getoption("--core-plugin-params"),
        config.getoption("--core-plugin-level"),
        exceptions,
        config.getoption("--core-plugin-report"),
    )

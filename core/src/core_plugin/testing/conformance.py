"""A run of a suite against one plugin."""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from core_plugin import document
from core_plugin.errors import ConfigError, CorePluginError
from core_plugin.params import Origin, near, parse_params
from core_plugin.testing.processes import Call, Outcome, Team
from core_plugin.testing.report import Case, Report

TIMEOUT = 30.0
"""Seconds that a case may take, unless it says otherwise."""
WIDTH = 160
"""Columns of the table where there is no terminal."""


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
            name=f"{item.path.stem.removeprefix('test_')}/{item.name.removeprefix('test_')}",
            level=argument("level", 0),
            capability=argument("requires", None),
            ranks=argument("ranks", 1),
            only=argument("only", None),
            timeout=argument("timeout_s", TIMEOUT),
            fresh=item.get_closest_marker("fresh") is not None,
            in_place=item.get_closest_marker("in_place") is not None,
            offline=item.get_closest_marker("offline") is not None,
        )


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
        self.folder = Path(str(module.__file__)).parent
        self.subject_type: Any = module.Subject

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


class Conformance:
    """The part of the pytest plugin that runs a suite.

    Args:
        plugin: What is tested, as ``type:name``.
        params: Its parameters, as ``key=value``.
        level: The highest level to run; all if None.
        exceptions: The reason, by the name of each case that may fail.
        file: Where a JSON report is written.

    Raises:
        CorePluginError: There is no such plugin, suite, level or parameter.
    """

    def __init__(
        self,
        plugin: str,
        params: Sequence[str],
        level: int | None,
        exceptions: Mapping[str, str],
        file: Path | None,
    ) -> None:
        type_name, _, name = plugin.partition(":")
        if not name:
            raise ConfigError("write TYPE:NAME, such as device:fake")
        self.suite = Suite(type_name)
        self.subject = self.suite.subject(name, params)
        levels = self.suite.subject_type.levels
        if level is not None and level not in levels:
            raise ConfigError(f"there is no level {level}; the levels are {levels}")
        self._plugin = plugin
        self._params = " ".join(params)
        self._level = level or max(levels)
        self._exceptions = exceptions
        self._file = file
        self._cases: dict[str, Case] = {}
        self._teams: dict[int, Team] = {}

    # Choosing

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note every case, so that one that is dropped later is in the report."""
        cases = [i for i in items if isinstance(i, pytest.Function) and self._is_case(i)]
        for item in cases:
            plan = item.stash[PLAN] = self._checked_plan(item)
            if plan.level > self._level:
                items.remove(item)
                continue
            for marker in self._markers(plan):
                item.add_marker(marker)
            says = (inspect.getdoc(item.function) or "").partition("\n")[0]
            self._cases[plan.name] = Case(plan.name, says, plan.level, plan.capability)
        items.sort(key=lambda item: item.stash[PLAN].level if PLAN in item.stash else 0)
        if unknown := sorted(self._exceptions.keys() - self._cases.keys()):
            close = near(unknown[0], self._cases)
            hint = f"; did you mean {close}?" if close else ""
            raise pytest.UsageError(f"there is no case {', '.join(unknown)} to except{hint}")

    def pytest_make_parametrize_id(self, val: object) -> str | None:
        """Call a dtype by its name."""
        return str(val).removeprefix("torch.") if type(val).__module__ == "torch" else None

    def _is_case(self, item: pytest.Item) -> bool:
        return item.path.parent == self.suite.folder

    def _checked_plan(self, item: pytest.Function) -> Plan:
        plan, subject_type = Plan.of(item), self.suite.subject_type
        if plan.level not in subject_type.levels:
            raise pytest.UsageError(f"{item.nodeid}: there is no level {plan.level}")
        if plan.capability not in {None, *subject_type.capability_names()}:
            raise pytest.UsageError(f"{item.nodeid}: there is no capability {plan.capability!r}")
        if plan.only not in {None, *subject_type.all_kinds}:
            raise pytest.UsageError(f"{item.nodeid}: there is no kind {plan.only!r}")
        return plan

    def _markers(self, plan: Plan) -> Iterator[str]:
        yield self.subject.name.rpartition(":")[2]
        if "accelerator" in self.subject.kinds:
            yield "accelerator"
        if not plan.offline:
            yield "hardware"

    # Running

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Run a case in its processes, and say how it ended."""
        plan = pyfuncitem.stash.get(PLAN, None)
        if plan is None:
            return None
        case = self._cases[plan.name]
        started = time.perf_counter()
        if plan.only and plan.only not in self.subject.kinds:
            case.result, case.reason = "not for it", f"it is for a {plan.only} device"
        elif plan.ranks > 1 and not self.subject.groups:
            case.result, case.reason = "not declared", "no collective library is declared"
        else:
            outcome = self._run(pyfuncitem, plan)
            declared = plan.capability is None or self.subject.declares(plan.capability)
            self._judge(case, outcome, declared)
        case.seconds = time.perf_counter() - started
        self._tell_pytest(case)
        return True

    def _run(self, item: pytest.Function, plan: Plan) -> Outcome:
        values = item.callspec.params if hasattr(item, "callspec") else {}
        names = tuple(
            name for name in item.fixturenames if name in self.suite.subject_type.arguments
        )
        call = Call(item.module.__name__, item.originalname, names, values)
        if plan.in_place:
            return _run_here(item, self.subject)
        if plan.fresh:
            return self._run_fresh(call, plan)
        if plan.ranks not in self._teams:
            self._teams[plan.ranks] = Team(self.subject, plan.ranks, grouped=plan.ranks > 1)
        outcome = self._teams[plan.ranks].run(call, plan.timeout)
        broken = outcome.kind in ("crashed", "timed out")
        if broken or (plan.ranks > 1 and outcome.kind != "passed"):
            self._teams.pop(plan.ranks).close()
        return outcome

    def _run_fresh(self, call: Call, plan: Plan) -> Outcome:
        team = Team(self.subject, plan.ranks, grouped=False)
        try:
            return team.run(call, plan.timeout)
        finally:
            team.close()

    def _judge(self, case: Case, outcome: Outcome, declared: bool) -> None:
        case.reason = outcome.message
        passed = outcome.kind == "passed"
        if case.name in self._exceptions:
            case.result = "fail" if passed else "excepted"
            case.reason = self._exceptions[case.name]
            if passed:
                case.reason = f"it passes, and needs no exception any more ({case.reason})"
        elif declared:
            case.result = "pass" if passed else "fail"
        elif passed:
            case.result = "undeclared, but works"
        else:
            case.result = "not declared" if outcome.clean else "fail"

    def _tell_pytest(self, case: Case) -> None:
        if case.result == "fail":
            pytest.fail(f"{case.says}\n{case.reason}", pytrace=False)
        if case.result == "excepted":
            pytest.xfail(case.reason)
        if case.result in ("not declared", "not for it"):
            lines = case.reason.strip().splitlines()
            pytest.skip(f"{case.result}: {lines[-1] if lines else ''}")

    # Reporting

    def report(self) -> Report:
        """What is known so far."""
        import torch

        origin = self.suite.subject_type.plugin_type(self.subject.name).registration().origin
        cases = list(self._cases.values())
        return Report(self._plugin, origin, self._params, torch.__version__, cases)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """End the processes, write the report, and fail if a case was dropped."""
        for team in self._teams.values():
            team.close()
        self._teams.clear()
        report = self.report()
        if self._file:
            self._file.write_text(json.dumps(report.as_dict(), indent=1), encoding="utf-8")
        if session.exitstatus == pytest.ExitCode.OK and report.level < self._asked_level():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _asked_level(self) -> int:
        """The highest level that the plugin could have reached in this run."""
        return max((c.level for c in self._cases.values() if c.result != "not declared"), default=0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        if not self._cases:
            return
        terminalreporter.write_sep("=", "conformance")
        terminal = terminalreporter.isatty
        width = shutil.get_terminal_size().columns if terminal else WIDTH
        terminalreporter.write_line(self.report().table(width))


def _run_here(item: pytest.Function, subject: Any) -> Outcome:
    """Run a case that brings its own processes; what it returns is shown in the report."""
    try:
        return Outcome("passed", item.obj(subject=subject) or "")
    except AssertionError as error:
        return Outcome("wrong", str(error))
    except CorePluginError as error:
        return Outcome("raised", str(error))

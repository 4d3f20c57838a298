"""A run of a suite against one plugin."""

from __future__ import annotations

import inspect
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from core_plugin.config import split_name
from core_plugin.errors import ConfigError, CorePluginError
from core_plugin.params import near
from core_plugin.testing.processes import Call, Outcome, Team
from core_plugin.testing.report import Case, Report
from core_plugin.testing.suite import PLAN, Plan, Suite

NAME = "core-plugin-conformance"
"""What the plugin is called in pytest's plugin manager."""
DESELECTED = "it was deselected"
WIDTH = 160
"""Columns of the table where there is no terminal."""


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
        type_name, name = split_name(plugin)
        if not type_name or not name:
            raise ConfigError(f"write TYPE:NAME, such as device:fake, and not {plugin!r}")
        self.suite = Suite(type_name)
        self.subject = self.suite.subject(name, params)
        levels = self.suite.subject_type.levels
        if level is not None and level not in levels:
            raise ConfigError(f"there is no level {level}; the levels are {levels}")
        self._kinds = self.subject.kinds
        self._plugin = f"{type_name}:{name}"
        self._params = " ".join(params)
        self._level = level or max(levels)
        self._exceptions = exceptions
        self._file = file
        if file and (file.is_dir() or not file.absolute().parent.is_dir()):
            raise ConfigError(f"the report cannot be written: {file} is a folder, or in none")
        self._cases: dict[str, Case] = {}
        self._teams: dict[int, Team] = {}
        self._told: dict[str, str] = {}
        """The first case that failed for a reason; the others refer to it."""

    # Choosing

    def pytest_collect_file(
        self, file_path: Path, parent: pytest.Collector
    ) -> pytest.Collector | None:
        """Collect the suite's files, whatever a project's own are called."""
        patterns = parent.config.getini("python_files")
        if file_path in self.suite.files and not any(map(file_path.match, patterns)):
            return pytest.Module.from_parent(parent, path=file_path)
        return None

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
        self._note_missing()
        items.sort(key=lambda item: item.stash[PLAN].level if PLAN in item.stash else 0)
        if unknown := sorted(self._exceptions.keys() - self._cases.keys()):
            close = near(unknown[0], self._cases)
            hint = f"; did you mean {close}?" if close else ""
            raise pytest.UsageError(f"there is no case {', '.join(unknown)} to except{hint}")

    def _note_missing(self) -> None:
        """Note the cases that pytest did not collect, because of settings or of other plugins."""
        collected = {case.function for case in self._cases.values()}
        for name, function, marks in self.suite.functions():
            level = marks["level"].args[0]
            if name not in collected and level <= self._level:
                says = (inspect.getdoc(function) or "").partition("\n")[0]
                reason = "pytest did not collect it"
                self._cases[name] = Case(name, says, level, result="not run", reason=reason)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Note why a case is not run."""
        for item in items:
            if PLAN in item.stash:
                self._cases[item.stash[PLAN].name].reason = DESELECTED

    def pytest_make_parametrize_id(self, val: object) -> str | None:
        """Call a dtype by its name."""
        return str(val).removeprefix("torch.") if type(val).__module__ == "torch" else None

    def _is_case(self, item: pytest.Item) -> bool:
        return item.path in self.suite.files

    def _checked_plan(self, item: pytest.Function) -> Plan:
        plan, subject_type = Plan.of(item), self.suite.subject_type
        if plan.level not in subject_type.levels:
            raise pytest.UsageError(f"{item.nodeid}: there is no level {plan.level}")
        if plan.capability not in {None, *subject_type.capability_names()}:
            raise pytest.UsageError(f"{item.nodeid}: there is no capability {plan.capability!r}")
        if plan.only and plan.only not in subject_type.all_kinds:
            raise pytest.UsageError(f"{item.nodeid}: there is no kind {plan.only!r}")
        return plan

    def _markers(self, plan: Plan) -> Iterator[str]:
        yield self.subject.name.rpartition(":")[2]
        if "accelerator" in self._kinds:
            yield "accelerator"
        if self.suite.subject_type.hardware and not plan.offline:
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
        if plan.only and plan.only not in self._kinds:
            told = self.suite.subject_type.all_kinds[plan.only]
            case.result, case.reason = "not for it", f"it is for {told}"
        elif plan.ranks > 1 and not self.subject.groups:
            case.result, case.reason = "not declared", "no collective library is declared"
        else:
            outcome = self._run(pyfuncitem, plan)
            declared = plan.capability is None or self.subject.declares(plan.capability)
            self._judge(case, outcome, declared)
        self._except(case)
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
        if outcome.kind == "not here":
            case.result = "not for it" if declared else "not declared"
        elif declared:
            case.result = "pass" if passed else "fail"
        elif passed:
            case.result = "undeclared, but works"
        else:
            case.result = "not declared" if outcome.clean else "fail"

    def _except(self, case: Case) -> None:
        """Let a case fail that may, and fail one that does not."""
        reason = self._exceptions.get(case.name)
        if reason and case.result == "fail":
            case.result, case.reason = "excepted", reason
        elif reason:
            told = f"{case.result}: it needs no exception ({reason})"
            case.result, case.reason = "fail", told

    def _tell_pytest(self, case: Case) -> None:
        if case.result == "fail":
            cause = case.reason.strip().rpartition("\n")[2]
            first = self._told.setdefault(cause, case.name)
            told = case.reason if first == case.name else f"as {first}: {cause}"
            pytest.fail(f"{case.says}\n{told}", pytrace=False)
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
        """End the processes, write the report, and fail if a case vanished."""
        for team in self._teams.values():
            team.close()
        self._teams.clear()
        if session.config.option.collectonly:
            return
        if self._file:
            report = json.dumps(self.report().as_dict(), indent=1)
            self._file.write_text(report, encoding="utf-8")
        vanished = [
            c for c in self._cases.values() if c.result == "not run" and c.reason != DESELECTED
        ]
        if session.exitstatus == pytest.ExitCode.OK and (vanished or not self._cases):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int
    ) -> None:
        """Print the table."""
        usage = exitstatus == pytest.ExitCode.USAGE_ERROR
        if usage or not self._cases or terminalreporter.config.option.collectonly:
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

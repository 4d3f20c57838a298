"""What a conformance run found: a table, JSON, and the level that was reached."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import rich.console
import rich.table

Result = Literal[
    "pass", "fail", "not declared", "undeclared, but works", "excepted", "not for it", "not run"
]
GOOD: frozenset[Result] = frozenset(
    ("pass", "not declared", "undeclared, but works", "excepted", "not for it")
)
"""The results with which a level is reached."""


@dataclass
class Case:
    """One case of a suite."""

    name: str
    says: str
    """What must hold."""
    level: int
    capability: str | None = None
    result: Result = "not run"
    reason: str = ""
    seconds: float = 0.0

    @property
    def function(self) -> str:
        """The name without that of the variant."""
        return self.name.partition("[")[0]


@dataclass(frozen=True)
class Report:
    """All cases of a run, and what they were run on."""

    plugin: str
    origin: str
    params: str
    torch: str
    cases: Sequence[Case]

    @property
    def level(self) -> int:
        """The highest level that was reached, with all those below it; 0 if none was."""
        reached = 0
        for level in sorted({case.level for case in self.cases}):
            results = {case.result for case in self.cases if case.level == level}
            if not results <= GOOD or "pass" not in results:
                break
            reached = level
        return reached

    @property
    def exceptions(self) -> dict[str, str]:
        """The cases that failed and were excepted, with their reasons."""
        return {case.name: case.reason for case in self.cases if case.result == "excepted"}

    def as_dict(self) -> dict[str, Any]:
        """The report for scripts."""
        return {
            "plugin": self.plugin,
            "origin": self.origin,
            "params": self.params,
            "torch": self.torch,
            "level": self.level,
            "results": dict(Counter(case.result for case in self.cases)),
            "exceptions": self.exceptions,
            "cases": [asdict(case) for case in self.cases],
        }

    def table(self, width: int) -> str:
        """The report for people: a line a case, or for all variants of one that ended alike."""
        table = rich.table.Table(box=None, pad_edge=False)
        table.add_column("case", overflow="fold")
        for title in ("level", "capability", "result"):
            table.add_column(title, no_wrap=True)
        table.add_column("seconds", justify="right", no_wrap=True)
        for variants in _variants([case for case in self.cases if case.result != "not run"]):
            first, seconds = variants[0], sum(case.seconds for case in variants)
            name = first.name if len(variants) == 1 else f"{first.function} ({len(variants)})"
            row = (name, str(first.level), first.capability or "", first.result, f"{seconds:.2f}")
            table.add_row(*row)
        console = rich.console.Console(
            file=io.StringIO(), width=width, markup=False, highlight=False
        )
        console.print(table)
        return f"{console.file.getvalue()}\n{self.summary()}"  # type: ignore[attr-defined]

    def summary(self) -> str:
        """What was tested, how many cases ended how, and the level."""
        counts = Counter(case.result for case in self.cases)
        lines = [
            f"{self.plugin} ({self.origin}) {self.params}, torch {self.torch}",
            f"{len(self.cases)} cases: " + ", ".join(f"{n} {what}" for what, n in counts.items()),
        ]
        lines += [
            f"not run, as {reason}: {_listed(cases)}" for reason, cases in self._not_run().items()
        ]
        passed = [case for case in self.cases if case.result == "pass" and case.reason]
        lines += [f"{case.name}: {case.reason}" for case in passed]
        lines += [f"excepted: {name}: {reason}" for name, reason in self.exceptions.items()]
        lines += [
            f"works, though {capability} is not declared: {', '.join(cases)}"
            for capability, cases in self._working_undeclared().items()
        ]
        exceptions = ", with the exceptions above" if self.exceptions else ""
        return "\n".join([*lines, f"level reached: {self.level}{exceptions}"])

    def _not_run(self) -> dict[str, list[str]]:
        """The cases that were not run, by the reason."""
        found: dict[str, list[str]] = {}
        for case in self.cases:
            if case.result == "not run":
                found.setdefault(case.reason or "the run ended before", []).append(case.name)
        return found

    def _working_undeclared(self) -> dict[str | None, list[str]]:
        """The cases that pass by capability, where it is not declared."""
        found: dict[str | None, list[str]] = {}
        for case in self.cases:
            if case.result == "undeclared, but works":
                found.setdefault(case.capability, []).append(case.name)
        return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _variants(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Cases of one function that ended alike, together; those that failed, each alone."""
    groups: dict[tuple[str, Result], list[Case]] = {}
    for case in cases:
        alone = case.name if case.result not in GOOD else case.function
        groups.setdefault((alone, case.result), []).append(case)
    yield from groups.values()

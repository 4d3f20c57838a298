"""Every operator that torch has samples for gives what it gives on the CPU."""

from collections import Counter

import pytest

from core_plugin.testing.device.operators import compare_operators
from core_plugin.testing.device.operators_comparison import Kind, OperatorResult
from core_plugin.testing.device.subject import Subject

pytestmark = [pytest.mark.level(1), pytest.mark.in_place]

BAD = ("different", "crashed", "unexpectedly equal")


COMPARED: dict[int, tuple[Subject, list[OperatorResult]]] = {}
"""What was found, by the id of a subject; it need not be hashable, and is kept for its id."""


def compared(subject: Subject) -> list[OperatorResult]:
    """All operators, forward and backward: it is cheaper to compare both in one go."""
    if id(subject) not in COMPARED:
        COMPARED[id(subject)] = subject, compare_operators(subject)
    return COMPARED[id(subject)][1]


def judged(subject: Subject, kind: Kind) -> str:
    """How many operators there are of each outcome, and which are known to differ."""
    results = [r for r in compared(subject) if r.kind == kind]
    bad = [f"{r.operator}: {r.outcome}: {r.message}" for r in results if r.outcome in BAD]
    assert not bad, f"{len(bad)} of {len(results)} operators:\n" + "\n".join(bad)
    counts = Counter(r.outcome for r in results)
    told = ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())
    known = [f"{r.operator} ({r.message})" for r in results if r.outcome == "known"]
    return f"{told}; known: {', '.join(known)}" if known else told


def test_operators_forward(subject: Subject) -> str:
    """The results of all operators are the CPU's."""
    return judged(subject, "forward")


def test_operators_backward(subject: Subject) -> str:
    """The gradients of all operators are the CPU's."""
    return judged(subject, "backward")

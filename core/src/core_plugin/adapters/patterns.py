"""A method's parameters at each place, as the fields that are patterns say.

A key of a pattern is a name, as in a list of targets; with ``^`` before it, it is a whole path. A
key with other characters of regular expressions is one, for a whole path or its end after a dot.
The most specific key wins: a whole path, then the name with more dots, then a regular expression.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Container, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from core_plugin.adapters.rules import Names, Report, Rule, is_regex

T = TypeVar("T", bound=Hashable)
Pattern = Rule | Mapping[str, Any]
"""Values by keys; or a rule, where the value is True."""


class Match(NamedTuple):
    """A key that fits a place, how specific it is there, and the value that it gives."""

    key: str
    specificity: int
    value: Any


def changed_params(
    params: Any,
    patterns: Mapping[str, str],
    targets: Names[T],
    written: Container[str],
    report: Report,
) -> dict[T, Any]:
    """The parameters at the targets that some pattern changes; equal ones are one object.

    Args:
        params: The method's parameters.
        patterns: See :attr:`core_plugin.types.peft.BasePeft.patterns`.
        targets: The targets.
        written: The patterns of which every key has to match something.
        report: Where to say what is wrong.
    """
    winners: dict[T, dict[str, Match]] = {}
    for pattern in patterns:
        rule = _usable(pattern, getattr(params, pattern, None) or [], report)
        if not (rule and targets.named):
            continue
        found, unused = _matches(rule, targets)
        if pattern in written:
            report.fault(pattern, *_explained(rule, unused, targets))
        for place, matches in found.items():
            winners.setdefault(place, {})[pattern] = _best(pattern, matches, report)
    made: dict[str, Any] = {}
    changed = {}
    for place, best in winners.items():
        outcome = repr({pattern: match.value for pattern, match in best.items()})
        if outcome not in made:
            made[outcome] = _replaced(params, patterns, best, report)
        changed[place] = made[outcome]
    return changed


def _usable(pattern: str, rule: Pattern, report: Report) -> Pattern:
    """A pattern without the keys that are no regular expressions, though they look like one."""
    if not isinstance(rule, Mapping):
        return rule
    usable = {}
    for key, value in rule.items():
        try:
            re.compile(key)
        except re.error as error:
            report.fault(pattern, f"{key!r} is not a regular expression: {error}")
        else:
            usable[key] = value
    return usable


def _matches(rule: Pattern, targets: Names[T]) -> tuple[dict[T, list[Match]], list[str]]:
    """What fits each target, and the keys that fit none."""
    matches: dict[T, list[Match]] = {}
    unused = []
    for key, value, hits in _hits(rule, targets):
        if not hits:
            unused.append(key)
        for path, place in hits:
            matches.setdefault(place, []).append(Match(key, specificity(key, path), value))
    return matches, unused


def _hits(rule: Pattern, targets: Names[T]) -> Iterator[tuple[str, Any, list[tuple[str, T]]]]:
    """The keys of a pattern, their values, and what they fit."""
    if not isinstance(rule, Mapping):
        for entry, hits in targets.match(rule).items():
            yield entry, True, hits
        return
    names = targets.match([key.removeprefix("^") for key in rule])
    for key, value in rule.items():
        name = key.removeprefix("^")
        if is_regex(name):
            regex = rf"(.*\.)?({key})"
            yield key, value, targets.match(regex)[regex]
        elif name != key:
            yield key, value, [(path, place) for path, place in names[name] if path == name]
        else:
            yield key, value, names[name]


def specificity(key: str, path: str) -> int:
    """How specific a key is that fits a path; of several, the most specific one decides."""
    if key.removeprefix("^") == path:
        return sys.maxsize
    return 0 if is_regex(key) else key.count(".") + 1


def _best(pattern: str, matches: list[Match], report: Report) -> Match:
    """The most specific one; a fault if others are as specific and say something else."""
    best = max(matches, key=lambda match: match.specificity)
    for other in matches:
        if other.specificity == best.specificity and other.value != best.value:
            fault = (
                f"{best.key!r} ({best.value!r}) and {other.key!r} ({other.value!r}) fit the same "
                "target, and neither is more specific"
            )
            if f"peft.{pattern}: {fault}" not in report.faults:
                report.fault(pattern, fault)
    return best


def _replaced(
    params: Any, patterns: Mapping[str, str], best: Mapping[str, Match], report: Report
) -> Any:
    values = {patterns[pattern]: match.value for pattern, match in best.items()}
    try:
        return dataclasses.replace(params, **values)
    except ValueError as error:
        keys = ", ".join(repr(match.key) for match in best.values())
        report.fault(next(iter(best)), f"{keys}: {error}")
        return params


def _explained(rule: Pattern, unused: list[str], targets: Names[T]) -> Iterator[str]:
    if not isinstance(rule, Mapping):
        yield from targets.missing(rule, unused)
        return
    regexes = [key for key in unused if is_regex(key.removeprefix("^"))]
    yield from (f"{key!r} matches no {targets.kind}" for key in regexes)
    yield from targets.missing([], [key for key in unused if key not in regexes])

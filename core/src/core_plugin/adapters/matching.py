"""Which modules the target and exclude rules of a method's parameters mean.

A string is a regular expression for the whole path of a module; an entry of a list is a path, or
the end of one after a dot; ``all-linear`` is every linear layer but the output head. Exclusion
comes first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from core_plugin.adapters.tree import Site, linear_layers
from core_plugin.params import near

Wanted = str | Sequence[str] | None
Rule = Callable[[str], Set[str]]
"""Gives the entries of a rule that a path fits."""

ALL_LINEAR = "all-linear"


def select(sites: Sequence[Site], params: Any) -> tuple[list[Site], list[str]]:
    """The sites that a method's parameters mean, and what is wrong with the rules."""
    targets: Wanted = params.target_modules
    excluded: Wanted = params.exclude_modules
    target_rule, exclude_rule = rule(targets, sites), rule(excluded, sites)
    chosen: list[Site] = []
    target_hits: set[str] = set()
    exclude_hits: set[str] = set()
    for site in sites:
        hits = {entry for path in site.paths for entry in target_rule(path)}
        without = {entry for path in site.paths for entry in exclude_rule(path)}
        target_hits |= hits
        exclude_hits |= without
        if hits and not without:
            chosen.append(site)
    faults = [_no_such("peft.target_modules", e, sites) for e in _unused(targets, target_hits)]
    faults += [_no_such("peft.exclude_modules", e, sites) for e in _unused(excluded, exclude_hits)]
    if not chosen:
        faults += [
            f"peft.target_modules: all that {entry!r} matches is excluded by exclude_modules "
            f"({excluded!r})"
            for entry in sorted(target_hits)
        ]
    return chosen, faults


def rule(wanted: Wanted, sites: Sequence[Site]) -> Rule:
    """Compile what was written under ``target_modules`` or ``exclude_modules``."""
    if isinstance(wanted, str):
        if wanted.lower() == ALL_LINEAR:
            linear = {path for site in linear_layers(sites) for path in site.paths}
            return lambda path: {wanted} if path in linear else set()
        pattern = re.compile(wanted)
        return lambda path: {wanted} if pattern.fullmatch(path) else set()
    entries = frozenset(wanted or ())
    return lambda path: entries.intersection(_endings(path))


def _endings(path: str) -> Iterator[str]:
    """The path, and what follows each of its dots."""
    yield path
    while "." in path:
        path = path.partition(".")[2]
        yield path


def _unused(wanted: Wanted, hits: Set[str]) -> list[str]:
    entries = [wanted] if isinstance(wanted, str) else wanted or ()
    return [entry for entry in dict.fromkeys(entries) if entry not in hits]


def _no_such(rule_name: str, entry: str, sites: Sequence[Site]) -> str:
    if entry.lower() == ALL_LINEAR:
        return f"{rule_name}: the model has no nn.Linear apart from its output head"
    depth = entry.count(".") + 1
    names = {".".join(path.split(".")[-depth:]) for site in sites for path in site.paths}
    message = f"{rule_name}: no module is called {entry!r}"
    if entry in names:
        return (
            f"{rule_name}: {entry!r} matches no module: a string is a regular expression for a "
            f"whole path; for all modules of that name write a list, [{entry}]"
        )
    close = near(entry, sorted(names))
    return f"{message}; did you mean {close}?" if close else message

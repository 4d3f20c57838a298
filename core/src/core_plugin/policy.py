"""Which installed plugins may be loaded: allow and deny lists, and the protection of built-ins.

The lists come from the environment (``CORE_PLUGIN_ALLOW``, ``CORE_PLUGIN_DENY``: comma-separated)
and from ``plugins: {allow: [...], deny: [...]}`` in the YAML. An entry is a distribution's name,
optionally with versions (``acme``, ``acme>=1.2,<2``). A distribution is used if no deny list has
it and every allow list does; an empty allow list leaves the built-ins alone, which are always
allowed. What is denied is not imported.
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from core_plugin import discovery
from core_plugin.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from core_plugin.discovery import Candidate, Distribution


@dataclass(frozen=True)
class _List:
    """One allow or deny list."""

    source: str
    allows: bool
    entries: tuple[Requirement, ...]

    def denial(self, distribution: Distribution) -> str | None:
        """Why the distribution may not be used, or None if the list does not mind."""
        named = [e for e in self.entries if canonicalize_name(e.name) == distribution.name]
        fitting = [e for e in named if e.specifier.contains(distribution.version, prereleases=True)]
        if not self.allows:
            return f"{self.source} has {fitting[0]}" if fitting else None
        if fitting:
            return None
        if named:
            return f"{self.source} has {named[0]}, and this is {distribution.version}"
        return f"{self.source} does not have it"


@dataclass(frozen=True)
class Policy:
    """Allow and deny lists, all of which count."""

    lists: tuple[_List, ...] = ()

    @classmethod
    def of(
        cls,
        allow: Iterable[str] | None,
        deny: Iterable[str],
        sources: tuple[str, str] = ("plugins.allow", "plugins.deny"),
    ) -> Policy:
        """Parse an allow list (None: everything is allowed) and a deny list.

        Args:
            allow: Distributions' names, optionally with versions.
            deny: The same.
            sources: What the two lists are called, for the messages.

        Raises:
            ConfigError: An entry is something else.
        """
        lists = [] if allow is None else [_parse(sources[0], True, allow)]
        return cls((*lists, _parse(sources[1], False, deny)))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Policy:
        """The lists in ``CORE_PLUGIN_ALLOW`` and ``CORE_PLUGIN_DENY``."""
        allow = environment.get("CORE_PLUGIN_ALLOW")
        return cls.of(
            None if allow is None else _split(allow),
            _split(environment.get("CORE_PLUGIN_DENY", "")),
            ("CORE_PLUGIN_ALLOW", "CORE_PLUGIN_DENY"),
        )

    def __and__(self, other: Policy) -> Policy:
        """What both policies let through."""
        return Policy(self.lists + other.lists)

    def denial(self, distribution: Distribution) -> str | None:
        """Why the distribution may not be used, or None if it may."""
        if distribution.is_core:
            return None
        denials = (one.denial(distribution) for one in self.lists)
        return next(filter(None, denials), None)

    def unknown_names(self) -> list[str]:
        """What is to be said about entries that name no distribution with plugins."""
        known = {c.distribution.name for c in discovery.scan().candidates}
        return [
            f"{one.source} has {entry.name!r}, which is none of the installed distributions with "
            f"plugins: {', '.join(sorted(known))}"
            for one in self.lists
            for entry in one.entries
            if canonicalize_name(entry.name) not in known
        ]

    def warn_of_unknown_names(self) -> None:
        """Warn about entries that name no distribution with plugins, as a typo does."""
        for message in self.unknown_names():
            warnings.warn(message, stacklevel=2)


_run_policy = Policy()


def active() -> Policy:
    """The environment's lists together with the run's.

    Raises:
        ConfigError: An entry in the environment is not a distribution's name.
    """
    return Policy.from_environment() & _run_policy


def use(policy: Policy) -> None:
    """Make a run's lists count for every plugin that is resolved from now on.

    Raises:
        ConfigError: An entry in the environment is not a distribution's name.
    """
    global _run_policy
    _run_policy = policy
    active()


def contenders(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those of the candidates with one name that the name may stand for.

    They are in use and allowed. A built-in stands before all others, which are reached by their
    qualified names: installing a package changes no run.
    """
    policy = active()
    allowed = [c for c in candidates if not c.shadowed_by and not policy.denial(c.distribution)]
    return [c for c in allowed if c.distribution.is_core] or allowed


def _split(text: str) -> list[str]:
    """The entries of a comma-separated list; a comma before an operator is within an entry."""
    return re.split(r",(?!\s*[<>=!~])", text)


def _parse(source: str, allows: bool, entries: Iterable[str]) -> _List:
    requirements, faults = [], []
    for entry in filter(None, (e.strip() for e in entries)):
        try:
            requirement = Requirement(entry)
        except InvalidRequirement:
            requirement = None
        if requirement and not (requirement.extras or requirement.url or requirement.marker):
            requirements.append(requirement)
        else:
            faults.append(f"{source}: {entry!r} is not a distribution's name (acme, acme>=1.2)")
    if faults:
        raise ConfigError(*faults)
    return _List(source, allows, tuple(requirements))

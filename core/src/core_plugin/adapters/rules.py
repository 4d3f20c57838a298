"""What a rule means: the one matcher of every field that names modules or parameters.

A string is a regular expression for a whole path. An entry of a list is a path, or the end of one
after a dot: ``q_proj`` is ``layers.0.q_proj`` but not ``my_q_proj``.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from core_plugin.params import near

T = TypeVar("T")
Rule = str | Sequence[str]
Hits = dict[str, list[tuple[str, T]]]
"""What each entry of a rule matches, with the paths that it matches; a string is one entry."""

SHOWN = 3
"""How many names of a kind a message has."""
EXPLAINED = 20
"""For how many entries of a rule near names are looked up."""

_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_REGEX_CHARACTERS = frozenset(r"\^$*+?{}[]|()")


def entries(rule: Rule) -> list[str]:
    """What is to match something each: a string, or what is in a list."""
    return [rule] if isinstance(rule, str) else list(dict.fromkeys(rule))


def without_hits(hits: Hits[T]) -> list[str]:
    """The entries that match nothing."""
    return [entry for entry, found in hits.items() if not found]


def endings(path: str) -> Iterator[str]:
    """The path, and what follows each of its dots."""
    yield path
    while "." in path:
        path = path.partition(".")[2]
        yield path


def is_regex(entry: str) -> bool:
    """Whether a text has characters that only a regular expression has; a dot is none."""
    return not _REGEX_CHARACTERS.isdisjoint(entry)


def block_number(path: str, lists: Sequence[str] = ()) -> int | None:
    """The number of the block that a path is in; None if it is in none.

    Args:
        path: The path.
        lists: The names of the lists that count. Without any, the first number is the block's,
            so it is never an expert's in a block.
    """
    for number in _NUMBER.finditer(path):
        before = path[: number.start()].removesuffix(".")
        if not lists or any(ending in lists for ending in endings(before)):
            return int(number[0])
    return None


def some(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


@dataclasses.dataclass
class Report:
    """What is said about the fields of a method's parameters."""

    faults: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)

    def fault(self, field: str, *messages: str) -> None:
        """Note what is wrong with a field."""
        self.faults += [f"peft.{field}: {message}" for message in messages]

    def warn(self, field: str, *messages: str) -> None:
        """Note what may not be meant."""
        self.warnings += [f"peft.{field}: {message}" for message in messages]


class Names(Generic[T]):
    """Things of a model by their paths; one may have several.

    Args:
        named: The paths and the things.
        kind: What a thing is called in messages.
    """

    def __init__(self, named: Iterable[tuple[str, T]], kind: str = "module") -> None:
        self._source = named
        self.kind = kind
        self._examples: dict[int, list[str]] = {}

    @functools.cached_property
    def named(self) -> list[tuple[str, T]]:
        """All of them."""
        return list(self._source)

    @functools.cached_property
    def _by_name(self) -> dict[str, list[tuple[str, T]]]:
        by_name: dict[str, list[tuple[str, T]]] = collections.defaultdict(list)
        for pair in self.named:
            by_name[pair[0].rpartition(".")[2]].append(pair)
        return by_name

    def called(self, name: str) -> Sequence[tuple[str, T]]:
        """Those whose paths have this last part."""
        return self._by_name.get(name, ())

    def match(self, rule: Rule) -> Hits[T]:
        """What each entry of a rule matches."""
        if isinstance(rule, str):
            fits = re.compile(rule).fullmatch
            return {rule: [pair for pair in self.named if fits(pair[0])]}
        hits: Hits[T] = {entry: [] for entry in rule}
        for name in dict.fromkeys(entry.rpartition(".")[2] for entry in hits):
            for pair in self.called(name):
                for ending in endings(pair[0]):
                    if ending in hits:
                        hits[ending].append(pair)
        return hits

    def in_order(self, chosen: Iterable[T]) -> list[T]:
        """Things in the order in which the model has them."""
        wanted = set(chosen)
        found = (thing for _, thing in self.named if thing in wanted) if wanted else ()
        return list(dict.fromkeys(found))

    def missing(self, rule: Rule, unmatched: Sequence[str]) -> list[str]:
        """Say of entries of a rule that each of them matches nothing, and what is near."""
        explain = self._no_path if isinstance(rule, str) else self._no_name
        messages = [explain(entry) for entry in unmatched[:EXPLAINED]]
        if rest := unmatched[EXPLAINED:]:
            messages.append(f"and no {self.kind} is called {', '.join(map(repr, rest))}")
        return messages

    def _no_path(self, regex: str) -> str:
        whole = "a string is a regular expression for a whole path"
        if not is_regex(regex) and any(self.match([regex])[regex]):
            return (
                f"{regex!r} matches no {self.kind}: {whole}; for all {self.kind}s of that name "
                f"write a list, [{regex}]"
            )
        longer = rf".*\.({regex})"
        if any(self.match(longer)[longer]):
            return f"{regex!r} matches no {self.kind}: {whole}; {longer!r} would match some"
        if is_regex(regex):
            return f"{regex!r} matches no {self.kind}; {whole}"
        return self._no_name(regex)

    def _no_name(self, entry: str) -> str:
        message = f"no {self.kind} is called {entry!r}"
        if close := near(entry, self._endings(entry.count(".") + 1)):
            return f"{message}; did you mean {close}?"
        if is_regex(entry):
            return f"{message}; what is in a list is a name, and a regular expression is a string"
        return message

    def _endings(self, depth: int) -> list[str]:
        """The last names of all paths; of those that differ in numbers alone, one."""
        if depth not in self._examples:
            tails = sorted({".".join(path.split(".")[-depth:]) for path, _ in self.named})
            examples = {_NUMBER.sub("0", tail): tail for tail in reversed(tails)}
            self._examples[depth] = sorted(examples.values())
        return self._examples[depth]

"""What is left of all that a rule names: exclusion, modules that are trained whole, blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from core_plugin.adapters.rules import Hits, Names, Report, block_number, entries, some
from core_plugin.adapters.tree import Site

Place = Site | tuple[Site, str]
"""A module, or a module and the name of one of its own parameters."""
P = TypeVar("P", Site, tuple[Site, str])


class Filter(NamedTuple):
    """Something that takes away what gets no adapter."""

    leaves_out: Callable[[str, Place], bool]
    """Whether it takes away what is at a path."""
    why: str
    """What to say of that."""
    silent: bool = False
    """Whether to say nothing while the field has other targets."""


class Selection:
    """Takes from what a field names all that gets no adapter.

    Args:
        modules: The model's modules.
        params: The method's parameters.
        taken: The modules that are trained otherwise, and how.
        whole: Those of them that are trained whole.
        report: Where to say what is wrong.
    """

    def __init__(
        self,
        modules: Names[Site],
        params: Any,
        taken: Mapping[Site, str],
        whole: Collection[Site],
        report: Report,
    ) -> None:
        self.report = report
        self.taken = taken
        self.blocks = Blocks(modules, params, report)
        self.filters: list[Filter] = []
        rule = params.exclude_modules or []
        if excluded := _excluded(modules, rule, report):
            why = f"is excluded by exclude_modules ({rule!r})"
            self.filters.append(Filter(lambda _, place: owner(place) in excluded, why, silent=True))
        if within := inside(whole):
            why = "is inside a module that is trained whole"
            self.filters.append(Filter(lambda _, place: id(owner(place).module) in within, why))
        if self.blocks.wanted:
            why = f"is in none of the blocks of layers_to_transform ({params.layers_to_transform})"
            self.filters.append(Filter(self.blocks.leave_out, why))

    def of_kind(self, field: str, kind: str, found: list[tuple[str, P]]) -> list[P]:
        """What gets an adapter of all modules of a kind: not those that are trained otherwise."""
        taken = self.taken
        free = [pair for pair in found if owner(pair[1]) not in taken] if taken else found
        missing = [] if free else [f"the model has no layer that {kind} means"]
        return self.of(field, {kind: free}, missing)

    def of(self, field: str, hits: Hits[P], missing: Sequence[str]) -> list[P]:
        """What gets an adapter of all that a field names.

        Args:
            field: The field.
            hits: What each of its entries matches.
            missing: What to say of the entries that match nothing.
        """
        kept: list[P] = []
        lost: dict[Filter, list[str]] = {}
        for entry, found in hits.items():
            left, by = self._left(found)
            kept += left
            if by:
                lost.setdefault(by, []).append(repr(entry))
        self._explain(field, missing, lost, nothing=not kept)
        self._check_taken(field, kept)
        return list(dict.fromkeys(kept))

    def _left(self, found: Sequence[tuple[str, P]]) -> tuple[list[P], Filter | None]:
        """What is left of what an entry matches; and if nothing is, what took it away."""
        for each in self.filters:
            left = [pair for pair in found if not each.leaves_out(*pair)]
            if found and not left:
                return [], each
            found = left
        return [place for _, place in found], None

    def _explain(
        self,
        field: str,
        missing: Sequence[str],
        lost: Mapping[Filter, Sequence[str]],
        nothing: bool,
    ) -> None:
        reasons = {by: f"all that {some(names)} matches {by.why}" for by, names in lost.items()}
        if nothing and (missing or reasons):
            self.report.fault(field, "; ".join([*missing, *reasons.values()]).replace("?;", "?"))
        else:
            self.report.fault(field, *missing)
            self.report.warn(field, *(text for by, text in reasons.items() if not by.silent))

    def _check_taken(self, field: str, kept: Sequence[P]) -> None:
        if not self.taken:
            return
        both: dict[str, list[str]] = {}
        for site in dict.fromkeys(map(owner, kept)):
            if how := self.taken.get(site):
                both.setdefault(how, []).append(site.path)
        for how, paths in both.items():
            self.report.fault(field, f"{some(paths)} {how}; leave it out there, or exclude it here")


class Blocks:
    """Leaves out what is not in the blocks of ``layers_to_transform``.

    Args:
        modules: The model's modules.
        params: The method's parameters.
        report: Where to say what is wrong.
    """

    def __init__(self, modules: Names[Site], params: Any, report: Report) -> None:
        numbers = params.layers_to_transform
        self.wanted = {numbers} if isinstance(numbers, int) else set(numbers or ())
        self.lists = entries(params.layers_pattern or ())
        self.report = report
        self._seen: set[int] = set()
        self._unnumbered: dict[Place, str] = {}
        self._kept: set[Place] = set()
        if self.lists:
            self._check_lists(modules)

    def leave_out(self, path: str, place: Place) -> bool:
        """Whether a path is in no block that is asked for; notes what is in no block at all."""
        number = block_number(path, self.lists)
        if number is None:
            self._unnumbered[place] = path
        else:
            self._seen.add(number)
        if number not in self.wanted:
            return True
        self._kept.add(place)
        return False

    def check(self) -> None:
        """Report the numbers of no block, and the targets that are in no block; called last."""
        vanished = [path for place, path in self._unnumbered.items() if place not in self._kept]
        if vanished:
            text = f"{some(vanished)}: in no numbered block, and so without an adapter"
            self.report.warn("layers_to_transform", text)
        if self._kept and (unused := sorted(self.wanted - self._seen)):
            numbers = some([str(number) for number in unused])
            text = f"no target is in block {numbers}; they are from {min(self._seen)} to "
            self.report.fault("layers_to_transform", f"{text}{max(self._seen)}")

    def _check_lists(self, modules: Names[Site]) -> None:
        numbered = (path.rpartition(".") for path, _ in modules.named)
        parents = {parent for parent, _, name in numbered if parent and name.isdecimal()}
        lists = Names(((path, path) for path in sorted(parents)), "list of blocks")
        unused = [entry for entry, found in lists.match(self.lists).items() if not found]
        self.report.fault("layers_pattern", *lists.missing(self.lists, unused))


def owner(place: Place) -> Site:
    """The module of a place."""
    return place if isinstance(place, Site) else place[0]


def inside(whole: Collection[Site]) -> set[int]:
    """The ids of the modules that are inside others."""
    children = (child for site in whole for child in site.module.children())
    return {id(module) for child in children for module in child.modules()}


def _excluded(modules: Names[Site], rule: str | Sequence[str], report: Report) -> set[Site]:
    hits = modules.match(rule)
    unused = [entry for entry, found in hits.items() if not found]
    report.warn("exclude_modules", *modules.missing(rule, unused))
    return {site for found in hits.values() for _, site in found}

"""Which plugins are installed: a scan of distribution metadata that imports no plugin.

A scan returns records and never raises: what cannot be read is a :class:`Problem`, so that one
broken distribution neither hides nor breaks another one's plugins. Only distributions whose
``entry_points.txt`` mentions ``core_plugin.`` are parsed, and those of the same names.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import importlib_metadata
from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from importlib_metadata import IDistribution as Metadata

GROUP_PREFIX = "core_plugin."
CORE = "core-plugin"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_PLAIN_NAME = re.compile(r"([^-]+)-[0-9]+(?:\.[0-9]+)*\.dist-info")
_INFO_NAME = re.compile(r"([^-]+)(-(?P<version>\d[^-]*)(-py\d.*)?)?\.(dist|egg)-info", re.I)
"""A metadata directory whose name tells the distribution's: its name has no dash."""


@dataclass(frozen=True)
class Distribution:
    """An installed distribution that declares plugins."""

    name: str
    """The name, canonical as PEP 503 defines it."""
    version: str
    location: str
    """The metadata directory (``*.dist-info`` or ``*.egg-info``)."""
    requires: tuple[str, ...] = ()
    metadata: Metadata | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({self.location})"

    @property
    def is_core(self) -> bool:
        """Whether its plugins are the built-in ones."""
        return self.name == CORE


@dataclass(frozen=True)
class Candidate:
    """One entry point of one distribution: a plugin that could be loaded."""

    group: str
    name: str
    value: str
    distribution: Distribution
    shadowed_by: str | None = None
    """The metadata directory that is in use in place of this one."""

    def __str__(self) -> str:
        return f"{self.value} of {self.distribution}"

    @property
    def type_name(self) -> str:
        """The name of the plugin type."""
        return self.group.removeprefix(GROUP_PREFIX)

    @property
    def entry_point(self) -> importlib_metadata.EntryPoint:
        """The entry point, whose ``load`` imports the plugin."""
        return importlib_metadata.EntryPoint(self.name, self.value, self.group)

    @property
    def qualified_name(self) -> str:
        """The name that chooses this distribution's plugin: ``distribution:name``."""
        return f"{self.distribution.name}:{self.name}"


@dataclass(frozen=True)
class Problem:
    """Metadata that could not be used, and what to do about it."""

    location: str
    message: str
    fix: str


@dataclass(frozen=True)
class Scan:
    """What one scan of the environment found, in an order that depends on names and path only."""

    candidates: tuple[Candidate, ...] = ()
    problems: tuple[Problem, ...] = ()

    versions: Mapping[str, Version] = field(default_factory=dict)
    """Of what a plugin may need besides core-plugin."""

    def group(self, group: str) -> tuple[Candidate, ...]:
        """The candidates of one entry-point group."""
        return tuple(c for c in self.candidates if c.group == group)


_lock = threading.Lock()
_scan: Scan | None = None


def scan() -> Scan:
    """The installed plugins; the environment is scanned once a process."""
    global _scan
    with _lock:
        if _scan is None:
            _scan = scan_distributions(_installed())
        return _scan


def forget() -> None:
    """Scan again on the next call, as after an installation in a running process."""
    global _scan
    with _lock:
        _scan = None
        _installed_version.cache_clear()
        importlib_metadata.MetadataPathFinder.invalidate_caches()


class _Directory(importlib_metadata.PathDistribution):
    """A metadata directory, read without pathlib, which costs more than the reading does."""

    def __init__(self, location: str) -> None:
        self._location = location

    @functools.cached_property
    def _path(self) -> Path:  # type: ignore[override]
        return Path(self._location)

    def __str__(self) -> str:
        return self._location

    def read_text(self, filename: str | os.PathLike[str]) -> str | None:
        """The text of a file in it, or None if it is not there or may not be read."""
        if not filename:  # for an .egg-info that is one file
            return super().read_text(filename)
        try:
            descriptor = os.open(f"{self._location}/{filename}", os.O_RDONLY)
        except NotADirectoryError:  # an .egg-info that is one file
            return super().read_text(filename)
        except (FileNotFoundError, PermissionError):
            return None
        with open(descriptor, "rb", buffering=0) as file:
            return file.read().decode()


def _installed() -> Iterator[Metadata]:
    """What importlib_metadata finds on the path; directories are listed here, which is faster."""
    for entry in dict.fromkeys(sys.path):
        try:
            files = os.listdir(entry or ".")
        except OSError:
            files = None
        if files is None or entry.lower().endswith(".egg"):
            if os.path.exists(entry):
                yield from importlib_metadata.distributions(path=[entry])
            continue
        for file in files:
            if file.lower().endswith((".dist-info", ".egg-info")):
                yield _Directory(os.path.join(entry, file))
    yield from importlib_metadata.distributions(path=[])  # other finders'


def scan_distributions(distributions: Iterable[Metadata]) -> Scan:
    """Read the plugins that the distributions declare.

    Args:
        distributions: In the order of the path: of two with one name, the first is the one that
            is in use and the other one is shadowed.
    """
    problems: list[Problem] = []
    sources = list(_sources(distributions, problems))
    texts = {source: text for source in sources if (text := source.entry_points(problems))}
    names = {source.name for source in texts}
    in_use = _choose([s for s in sources if s.name in names], problems)
    candidates: list[Candidate] = []
    for source, text in texts.items():
        distribution = source.read(problems)
        if distribution is None:
            continue
        winner = in_use[source.name]
        if source is not winner and source.is_beside_sources_of(winner, texts):
            continue
        shadowed_by = None if winner is source else winner.location
        if shadowed_by:
            problems.append(_shadowed(source, winner))
        for group, name, value in _parse(text, source.location, problems):
            candidates.append(Candidate(group, name, value, distribution, shadowed_by))
    candidates.sort(key=lambda c: (c.group, c.name, c.distribution.name, c.distribution.location))
    versions = {s.name: s.version for s in reversed(sources) if s.name == "torch"}
    return Scan(tuple(candidates), tuple(dict.fromkeys(problems)), versions)


class _Source:
    """A metadata directory: where it is, what it is called, and what can be read from it."""

    def __init__(self, metadata: Metadata, real: Callable[[str], str]) -> None:
        self.metadata = metadata
        self.location = str(metadata).rstrip("/")  # a zip's directories end with one
        parent, self.file = os.path.split(self.location)
        self.directory = real(parent)

    @functools.cached_property
    def name(self) -> str:
        """The distribution's name, from the directory's if that is clear, else from the metadata.

        ``acme-extra.egg-info`` is not a distribution called acme.
        """
        if match := _PLAIN_NAME.fullmatch(self.file):
            return canonicalize_name(match[1])
        match = _INFO_NAME.fullmatch(self.file)
        if match and _version(match["version"] or "0"):
            return canonicalize_name(match[1])
        return canonicalize_name(self._fields.get("Name") or self.file.rpartition(".")[0])

    @functools.cached_property
    def version(self) -> Version:
        """The version; the lowest one if there is none that can be read."""
        match = _INFO_NAME.fullmatch(self.file)
        written = match["version"] if match and match["version"] else self._fields.get("Version")
        return _version(written or "0") or Version("0")

    @functools.cached_property
    def is_complete(self) -> bool:
        """Whether there is metadata; what an interrupted uninstallation leaves has none."""
        return bool(self._fields.get("Name"))

    def is_beside_sources_of(self, other: _Source, texts: Mapping[_Source, str]) -> bool:
        """Whether it is what setuptools leaves in the sources that ``other`` was installed from.

        An editable installation has those on the path.
        """
        same = self.version == other.version and texts[self] == texts.get(other)
        return self.file.endswith(".egg-info") and other.file.endswith(".dist-info") and same

    def entry_points(self, problems: list[Problem]) -> str | None:
        """The text of ``entry_points.txt`` if it mentions one of our groups."""
        try:
            text = self.metadata.read_text("entry_points.txt")
        except Exception as error:
            problems.append(
                Problem(
                    os.path.join(self.location, "entry_points.txt"),
                    f"cannot be read, so plugins in it are lost: {error}",
                    f"re-install {self.name}",
                )
            )
            return None
        return text if text and GROUP_PREFIX in text else None

    def read(self, problems: list[Problem]) -> Distribution | None:
        """The distribution's name, version and requirements, unless they cannot be read."""
        if not self.is_complete:
            message = "has entry points but no readable METADATA, so its plugins are ignored"
        elif not _version(version := self._fields.get("Version") or ""):
            message = f"has the version {version!r}, which is none, so its plugins are ignored"
        else:
            requires = tuple(_requires(self.metadata))
            return Distribution(self.name, version, self.location, requires, self.metadata)
        fix = f"remove the directory and re-install {self.name}"
        problems.append(Problem(self.location, message, fix))
        return None

    @functools.cached_property
    def _fields(self) -> Mapping[str, str]:
        try:
            read = self.metadata.read_text
            headers = _headers(read("METADATA") or read("PKG-INFO") or read("") or "")
            return dict(reversed(headers))
        except Exception:  # the file is not there, not text, or in a broken archive
            return {}


def _requires(metadata: Metadata) -> Iterable[str]:
    text = metadata.read_text("METADATA")
    if text is None:  # an egg-info, whose requirements stand elsewhere and otherwise
        return metadata.requires or ()
    return [value for name, value in _headers(text) if name == "Requires-Dist"]


def _headers(text: str) -> list[tuple[str, str]]:
    """The header lines of METADATA; the email package would take longer to import than a scan."""
    lines = text.replace("\r\n", "\n").partition("\n\n")[0].splitlines()
    return [(name, value) for name, _, value in (line.partition(": ") for line in lines)]


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _sources(distributions: Iterable[Metadata], problems: list[Problem]) -> Iterator[_Source]:
    """One source a metadata directory, by path entry and, within one, by name.

    A directory that is reached twice, under two spellings or through a link, counts once.
    """
    positions: dict[str, int] = {}
    sources: dict[tuple[str, str], _Source] = {}
    real = functools.cache(os.path.realpath)
    try:
        for metadata in distributions:
            source = _Source(metadata, real)
            positions.setdefault(source.directory, len(positions))
            sources.setdefault((source.directory, source.file), source)
    except Exception as error:
        fix = "see which entry of sys.path or sys.meta_path raises it"
        problems.append(Problem("sys.path", f"cannot be searched to its end: {error!r}", fix))
    yield from sorted(sources.values(), key=lambda s: (positions[s.directory], s.file))


def _choose(sources: list[_Source], problems: list[Problem]) -> dict[str, _Source]:
    """The source that is in use for each name.

    It is the first one on the path, and within one directory the newest version; a directory
    without METADATA stands for a distribution only where there is no other.
    """
    by_name: dict[str, list[_Source]] = {}
    for source in sources:
        by_name.setdefault(source.name, []).append(source)
    in_use = {}
    for name, same in by_name.items():
        complete = [s for s in same if len(same) == 1 or s.is_complete]
        for left_over in (s for s in same if s not in complete):
            message = f"is a left-over without METADATA of another {name}"
            problems.append(Problem(left_over.location, message, "remove the directory"))
        first = (complete or same)[0]
        rivals = [s for s in complete or same if s.directory == first.directory]
        in_use[name] = max(rivals, key=lambda s: s.version)
    return in_use


def _shadowed(source: _Source, winner: _Source) -> Problem:
    fix = f"remove {winner.location} or take its directory off the path"
    if source.directory == winner.directory:
        fix = f"remove {source.location}, which is left over from another version"
    message = f"is shadowed by {winner.location}, so its plugins are not used"
    return Problem(source.location, message, fix)


def _parse(text: str, location: str, problems: list[Problem]) -> Iterator[tuple[str, str, str]]:
    """Yield (group, name, value) of our groups; a line that is wrong costs that line alone."""
    file = os.path.join(location, "entry_points.txt")
    group, seen = "", set()
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith(("#", ";")):
            continue
        if line.startswith("["):
            group = line[1:].removesuffix("]").strip()
            continue
        if not group.startswith(GROUP_PREFIX):
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        fault = _entry_fault(name, value) if equals else f"{name!r} has no '= module:object'"
        if (group, name) in seen:
            fault = f"{name!r} is there twice"
        if fault:
            where, fix = f"{file}:{number}", "tell the package's author, or re-install"
            problems.append(Problem(where, f"[{group}] {fault}", fix))
        else:
            seen.add((group, name))
            yield group, name, value


def _entry_fault(name: str, value: str) -> str | None:
    if not _NAME.fullmatch(name):
        return f"{name!r} is not a plugin's name (letters, digits, '_', '-', '.')"
    match = importlib_metadata.EntryPoint.pattern.match(value)
    if not match or not match["attr"]:
        return f"{name!r} = {value!r} is not an object reference (module:object)"
    return None


def incompatibility(distribution: Distribution) -> str | None:
    """Why the distribution's declared requirements rule out what is installed, or None.

    Only core-plugin and torch are looked at, since they are what a plugin is written against.
    pip checks the same when it installs, but upgrades, ``--no-deps`` and editable installations
    break it later. Built-ins fit: without torch they can be listed and validated, not run.
    """
    requirements = () if distribution.is_core else distribution.requires
    return "; ".join(filter(None, map(_unfulfilled, requirements))) or None


def _unfulfilled(text: str) -> str | None:
    try:
        requirement = Requirement(text)
        applies = not requirement.marker or requirement.marker.evaluate({"extra": ""})
    except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName):
        return None
    name = canonicalize_name(requirement.name)
    if name not in (CORE, "torch") or not applies:
        return None
    installed = _installed_version(name)
    if installed is None:
        # Some distributors' builds of torch have no metadata, and so no version to compare.
        return (
            None if importlib.util.find_spec(name) else f"requires {text}, which is not installed"
        )
    if not requirement.specifier.contains(installed, prereleases=True):
        return f"requires {text}, but {name} {installed} is installed"
    return None


@functools.cache
def _installed_version(name: str) -> Version | None:
    if name == CORE:
        from core_plugin import __version__

        return Version(__version__)
    return scan().versions.get(name)

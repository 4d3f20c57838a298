"""Which code a run is made of: a fingerprint of every plugin that it names."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from core_plugin.config import RunConfig, Selection
    from core_plugin.discovery import Distribution


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What identifies one plugin's code."""

    slot: str
    name: str
    distribution: str | None
    """None for a plugin that was registered in the process."""
    version: str | None
    digest: str
    """Of the code of its distribution; of its package, if that is installed in place or not at
    all. ``unknown`` if there is no source, as in an interactive session.
    """

    @property
    def identity(self) -> tuple[str, str, str | None]:
        """What must be equal for two runs to be of the same implementation."""
        return self.slot, self.name.rpartition(":")[2], self.distribution


def fingerprints(run: RunConfig) -> list[Fingerprint]:
    """One for each plugin that the run names, in the order of the YAML's keys.

    Code is read once a process, as it is imported once.
    """
    return [
        _fingerprint(slot, selection)
        for slot, chosen in run.selections.items()
        for selection in chosen
    ]


def _fingerprint(slot: str, selection: Selection) -> Fingerprint:
    distribution = selection.route.registration().distribution
    digest = _installed_digest(distribution) if distribution else None
    return Fingerprint(
        slot,
        selection.route.name,
        distribution.name if distribution else None,
        distribution.version if distribution else None,
        digest or _package_digest(selection.implementation),
    )


@functools.cache
def _installed_digest(distribution: Distribution) -> str | None:
    """The digest of the files that an installation put there, equal wherever the wheel was put.

    None if the code is installed in place, and so is not among them.
    """
    metadata = distribution.metadata
    if metadata is None or '"editable": true' in (metadata.read_text("direct_url.json") or ""):
        return None
    files = {
        str(file): file.read_binary()
        for file in metadata.files or ()
        if _is_code(file.parts) and not file.parts[0].endswith((".dist-info", ".egg-info"))
    }
    return _digest(files.items()) if files else None


def _package_digest(implementation: Any) -> str:
    """The digest of the whole package that an implementation is in, or of its one module."""
    name = getattr(implementation, "__module__", None) or type(implementation).__module__
    top = sys.modules.get(name.partition(".")[0])
    roots = getattr(top, "__path__", None) or filter(None, [getattr(top, "__file__", None)])
    return _directories_digest(tuple(roots))


@functools.cache
def _directories_digest(roots: tuple[str, ...]) -> str:
    files = [file for root in roots for file in _code_below(Path(root))]
    return _digest(files) if files else "unknown"


def _code_below(root: Path) -> Iterator[tuple[str, bytes]]:
    if root.is_file():
        yield root.name, root.read_bytes()
    for file in root.rglob("*"):
        path = file.relative_to(root.parent)
        if _is_code(path.parts) and file.is_file():
            yield path.as_posix(), file.read_bytes()


def _is_code(parts: tuple[str, ...]) -> bool:
    """Whether a file is part of the code: not compiled by this Python, no script, not hidden."""
    return not any(part == "__pycache__" or part.startswith(".") for part in parts)


def _digest(files: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files):
        digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def identity(run: RunConfig) -> dict[str, str]:
    """What all ranks of a run must have in common, as rows of a table."""
    import torch

    from core_plugin import __version__

    rows = {"core-plugin": __version__, "torch": torch.__version__}
    rows["configuration"] = run.digest()[:16]
    for number, mark in enumerate(fingerprints(run)):
        rows[f"{mark.slot} {mark.name} #{number}"] = (
            f"{mark.distribution} {mark.version} {mark.digest}"
        )
    return rows

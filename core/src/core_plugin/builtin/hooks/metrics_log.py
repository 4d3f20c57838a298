"""The hook ``jsonl``: a file of metrics, one JSON object a line."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core_plugin.params import require
from core_plugin.types.hook import Run, hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Params:
    """Where the metrics go.

    Attributes:
        file: The name of the file in the run's directory.
    """

    file: str = "metrics.jsonl"

    def __post_init__(self) -> None:
        require(is_file_name("file", self.file))


def jsonl(params: Params, run: Run) -> object | None:
    """Append each log's metrics to a file that has each step once, however often the run resumes.

    The lines of steps that a resumed run takes again are dropped when it starts; so is all of an
    earlier run when a new one starts in its directory.
    """
    return MetricsLog(run.directory / params.file) if run.rank == 0 else None


class MetricsLog:
    """Opens the file for each line, so that nothing is lost or left open when the run ends."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Drop what comes after the step that the run starts at."""
        keep(self._path, run.start_step)

    @hookimpl
    def on_log(self, metrics: Mapping[str, float]) -> None:
        """Append the metrics."""
        append(self._path, metrics)


def is_file_name(field: str, value: str) -> tuple[bool, str]:
    """The rule for a parameter that names a file in the run's directory."""
    return (
        value not in ("", "..") and Path(value).name == value,
        f"{field} must be the name of a file in the run's directory, got {value!r}",
    )


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record as one line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(record))


def read(path: Path, last_step: int) -> list[dict[str, Any]]:
    """The records up to a step. A line that a kill tore off is none; nor is one without a step."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        step = record.get("step") if isinstance(record, dict) else None
        if isinstance(step, int) and step <= last_step:
            records.append(record)
    return records


def keep(path: Path, last_step: int) -> None:
    """Drop the records after a step; the file is the old one or the new one at any moment."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text("".join(map(_line, read(path, last_step))), encoding="utf-8")
    os.replace(aside, path)


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(dict(record), ensure_ascii=False) + "\n"

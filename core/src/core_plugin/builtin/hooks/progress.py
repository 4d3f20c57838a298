"""The hook ``progress``: how far the run is, on standard output."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from typing import TYPE_CHECKING

from core_plugin.params import require
from core_plugin.types.hook import Run, hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rich.progress import ProgressColumn, Task


@dataclasses.dataclass(frozen=True)
class Params:
    """How much is printed.

    Attributes:
        min_seconds: Seconds that at least lie between two printed lines, the last step's excepted;
            0 prints a line for each log. A terminal's live line always shows the newest log.
    """

    min_seconds: float = 0.0

    def __post_init__(self) -> None:
        require(
            (
                0 <= self.min_seconds < math.inf,
                f"min_seconds must not be negative, got {self.min_seconds}",
            )
        )


def progress(params: Params, run: Run) -> object | None:
    """One live line on a terminal; a line for each log, and nothing live, everywhere else."""
    return Progress(params, run) if run.rank == 0 else None


class Progress:
    """Standard output is used, for it is what a run has to say: ``> log`` and ``| tee`` take it
    along, and standard error is left to what goes wrong.
    """  # noqa: D205

    def __init__(self, params: Params, run: Run) -> None:
        from rich.console import Console
        from rich.progress import BarColumn
        from rich.progress import Progress as Bar

        console = Console()
        self._live = sys.stdout.isatty() and console.is_interactive
        self._bar = Bar(
            _text_column(),
            BarColumn(bar_width=None),
            console=console,
            expand=True,
            disable=not self._live,
            speed_estimate_period=math.inf,
        )
        self._task = self._bar.add_task(
            "", total=run.steps, completed=run.start_step, metrics="starting"
        )
        self._min_seconds = params.min_seconds
        self._printed = -math.inf

    @hookimpl
    def on_start(self) -> None:
        """Show the empty line while the first step compiles and warms up."""
        self._bar.start()

    @hookimpl
    def on_step(self, run: Run) -> None:
        """Move the bar."""
        self._bar.start()
        self._bar.update(self._task, completed=run.step)

    @hookimpl
    def on_log(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Show the metrics."""
        text = (
            f"loss {metrics['loss']:.4g}  lr {metrics['lr']:.1e}  "
            f"{_count(metrics['tokens_per_second'])} tokens/s"
        )
        self._bar.update(self._task, metrics=text)
        now = time.monotonic()
        due = now - self._printed >= self._min_seconds or run.step == run.steps
        if due and not self._live:
            task = self._bar.tasks[0]
            print(f"{_state(task)}  {_clock(task.time_remaining)} left", flush=True)
            self._printed = now

    @hookimpl
    def on_checkpoint(self, path: Path) -> None:
        """Say where it is. The next step opens a new live line."""
        # The last event of a run that a signal stops is a checkpoint: after it nothing is open.
        self._close()
        print(f"saved {path}", flush=True)

    @hookimpl
    def on_end(self) -> None:
        """Leave the live line as it is and give the cursor back."""
        self._close()

    @hookimpl
    def on_error(self) -> None:
        """Leave the live line as it is and give the cursor back."""
        self._close()

    def _close(self) -> None:
        if self._live:
            self._bar.stop()


def _text_column() -> ProgressColumn:
    """One text, so that a narrow terminal first does without the bar, then cuts the line's end."""
    from rich.progress import ProgressColumn
    from rich.table import Column
    from rich.text import Text

    class TextColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            times = f"{_clock(task.elapsed)} < {_clock(task.time_remaining)} left"
            return Text(f"{_state(task)}  {times}")

    return TextColumn(table_column=Column(no_wrap=True))


def _state(task: Task) -> str:
    return f"step {task.completed}/{task.total}  {task.fields['metrics']}"


def _count(number: float) -> str:
    for unit in ("", "k", "M"):
        if number < 1000:
            return f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}G"


def _clock(seconds: float | None) -> str:
    """Hours, minutes and seconds; of the first step alone, no rate is known."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

"""The hook ``plot``: loss, learning rate and throughput as a picture."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
from typing import TYPE_CHECKING, Any

from core_plugin.builtin.hooks import metrics_log
from core_plugin.errors import PluginUnavailableError
from core_plugin.params import require
from core_plugin.types.hook import Run, hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

DRAWN = ("step", "loss", "lr", "tokens_per_second")


@dataclasses.dataclass(frozen=True)
class Params:
    """Where earlier steps are found.

    Attributes:
        metrics: The file in the run's directory that the hook ``jsonl`` writes. A run that resumes
            takes the steps before from there; without it, its plot begins where it resumed.
    """

    metrics: str = "metrics.jsonl"

    def __post_init__(self) -> None:
        require(metrics_log.is_file_name("metrics", self.metrics))


def plot(params: Params, run: Run) -> object | None:
    """Draw ``plot.png`` in the run's directory, anew at each checkpoint and at the end.

    Raises:
        PluginUnavailableError: Matplotlib is not installed; on every rank, so that none waits.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise PluginUnavailableError(
            "the hook 'plot' needs Matplotlib: pip install core-plugin[plot]"
        )
    return Plot(params, run) if run.rank == 0 else None


class Plot:
    """Keeps the few numbers of each log that are drawn."""

    def __init__(self, params: Params, run: Run) -> None:
        self._path = run.directory / "plot.png"
        earlier = metrics_log.read(run.directory / params.metrics, run.start_step)
        self._points = [_point(m) for m in earlier if all(name in m for name in DRAWN)]

    @hookimpl
    def on_log(self, metrics: Mapping[str, float]) -> None:
        """Take the log's point."""
        self._points.append(_point(metrics))

    @hookimpl
    def on_checkpoint(self) -> None:
        """Draw what there is so far."""
        self._draw()

    @hookimpl
    def on_end(self) -> None:
        """Draw the whole run."""
        self._draw()

    def _draw(self) -> None:
        if self._points:
            draw(self._points, self._path)


def draw(points: Sequence[tuple[float, ...]], path: Path) -> None:
    """Draw points of the metrics named in ``DRAWN``; the file is never there by half."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8), dpi=120, layout="constrained")
    panels: Sequence[Axes] = figure.subplots(3, sharex=True, height_ratios=(2, 1, 1))
    for panel in panels:
        panel.grid(color="0.9")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    _lines(panels, points)
    figure.align_ylabels(panels)
    aside = path.with_name(f".{path.name}.partial")
    figure.savefig(aside, format="png")
    os.replace(aside, path)


def _lines(panels: Sequence[Axes], points: Sequence[tuple[float, ...]]) -> None:
    import numpy as np
    from matplotlib.ticker import EngFormatter, MaxNLocator

    losses, rates, speeds = panels
    steps, loss, lr, speed = np.array(points, dtype=np.float64).T
    dots: dict[str, Any] = {"marker": "." if len(points) < 40 else None}

    losses.plot(steps, loss, color="tab:blue", linewidth=0.8, alpha=0.5, label="loss", **dots)
    reach = math.isqrt(len(points)) // 2
    if reach:
        label = f"mean of {2 * reach + 1} logs"
        losses.plot(steps, _smooth(loss, reach), color="tab:blue", linewidth=2, label=label)
    losses.set_ylabel("loss (nats per token)")
    losses.legend(frameon=False)

    rates.plot(steps, lr, color="tab:orange", **dots)
    rates.set_ylabel("learning rate")
    rates.ticklabel_format(axis="y", scilimits=(-2, 3))
    rates.set_ylim(bottom=0)

    speeds.plot(steps, speed, color="tab:green", linewidth=1, **dots)
    speeds.set_ylabel("throughput (tokens/s)")
    speeds.yaxis.set_major_formatter(EngFormatter(sep=""))
    speeds.set_ylim(bottom=0)
    speeds.set_xlabel("optimizer step")
    speeds.set_xlim(left=0)
    speeds.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def _point(metrics: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(metrics[name] for name in DRAWN)


def _smooth(values: NDArray[np.float64], reach: int) -> NDArray[np.float64]:
    """The mean over ``reach`` values to either side, or as many as there are.

    Near the start, where a loss falls steeply, the sides are kept equal.
    """
    import numpy as np

    index = np.arange(len(values))
    before = np.minimum(index, reach)
    after = np.minimum(index[::-1], before)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    means: NDArray[np.float64] = (sums[index + after + 1] - sums[index - before]) / (
        before + after + 1
    )
    return means

"""How fast Muon learns, against AdamW at the best of six learning rates.

Every run is a ``core-plugin train`` of a decoder of 0.9 million parameters, on nine tenths of the
text of the quick start (Python's own language reference): 1024 tokens a step, a cosine schedule,
one thread, two runs at a time. A hook takes the loss on the remaining tenth every ten steps, and
notes the CPU seconds of training alone. Seeds decide on the initial weights and the order of the
data; a run's losses are the same whenever it is run.

The losses to reach are those that all of AdamW's runs at its best learning rate have reached after
a quarter of the steps, a half, three quarters, and at the end. Muon runs at its default learning
rate and at twice that, and both again with a wrong routing: embeddings and head through Muon too.

Goals: fewer steps and less time than AdamW to each loss; the wrong routing is worse.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import matplotlib as mpl
from common import HERE, SCRIPTS, install_plugins, machine, output, table
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from matplotlib.axes import Axes

Curve = list[dict[str, float]]
"""Of a run: step, loss on the text held back, CPU seconds; every :data:`EVERY` steps."""

EVERY = 10
WRONG = {"rules": [{"match": r"embed_tokens|lm_head", "to": "muon"}]}
ADAMW = {
    f"AdamW, lr {lr:g}": {"name": "adamw", "lr": lr}
    for lr in (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
}
MUON = {f"Muon, lr {lr:g}": {"name": "muon", "lr": lr} for lr in (3e-3, 6e-3)}
MISROUTED = {f"{name}, wrong routing": options | WRONG for name, options in MUON.items()}
OPTIMIZERS = ADAMW | MUON | MISROUTED


def write_texts(directory: Path) -> None:
    """Every tenth page is held back."""
    pages = [topics[name] for name in sorted(topics)]
    held_back = pages[::10]
    training = [page for number, page in enumerate(pages) if number % 10]
    (directory / "training.txt").write_text("<|endoftext|>".join(training))
    (directory / "held-back.txt").write_text("<|endoftext|>".join(held_back))


def train(
    optimizer: Mapping, seed: int, steps: int, directory: Path, env: Mapping[str, str]
) -> Curve:
    """One run."""
    place = Path(tempfile.mkdtemp(dir=directory))
    config = {
        "model": {"name": "decoder", "hidden_size": 128, "layers": 3, "heads": 4},
        "data": {
            "name": "text",
            "path": str(directory / "training.txt"),
            "vocabulary_size": 1024,
            "sequence_length": 128,
        },
        "optimizer": optimizer,
        "scheduler": {"name": "cosine", "warmup_steps": 20},
        "hooks": [{"name": "validation", "text": str(directory / "held-back.txt"), "every": EVERY}],
        "device": "cpu",
        "train": {"steps": steps, "global_batch_size": 8, "micro_batch_size": 8, "seed": seed},
        "checkpoint": {"directory": str(place)},
    }
    file = place / "run.yaml"
    file.write_text(json.dumps(config))
    output([SCRIPTS / "core-plugin", "train", file], env)
    return [json.loads(line) for line in (place / "validation.jsonl").read_text().splitlines()]


def train_all(seeds: int, steps: int) -> dict[str, list[Curve]]:
    """The curves of each optimizer, one a seed. Seeds take turns, so that all see the same load."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        directory = Path(name)
        env = install_plugins(directory)
        write_texts(directory)
        one = functools.partial(train, steps=steps, directory=directory, env=env)
        runs = list(itertools.product(range(seeds), OPTIMIZERS))
        curves = list(pool.map(lambda run: one(OPTIMIZERS[run[1]], run[0]), runs))
    return {
        optimizer: [curve for run, curve in zip(runs, curves, strict=True) if run[1] == optimizer]
        for optimizer in OPTIMIZERS
    }


def final(curves: Iterable[Curve]) -> list[float]:
    return [curve[-1]["loss"] for curve in curves]


def reached(curve: Curve, loss: float, unit: str) -> float:
    """The steps or CPU seconds to a loss, interpolated; infinite if it was not reached."""
    before = {"step": 0, "cpu": 0.0, "loss": math.inf}
    for point in curve:
        if point["loss"] <= loss:
            drop = before["loss"] - point["loss"]
            share = (before["loss"] - loss) / drop if math.isfinite(drop) else 1
            return before[unit] + share * (point[unit] - before[unit])
        before = point
    return math.inf


def spread(values: Iterable[float], digits: int) -> str:
    """``minimum / median / maximum``."""
    ordered = sorted(values)
    shown = (ordered[0], statistics.median(ordered), ordered[-1])
    return " / ".join(f"{value:.{digits}f}" if math.isfinite(value) else "-" for value in shown)


def targets_of(curves: Sequence[Curve]) -> list[float]:
    points = len(curves[0])
    return [
        max(curve[max(round(points * part), 1) - 1]["loss"] for curve in curves)
        for part in (0.25, 0.5, 0.75, 1)
    ]


def print_tables(curves: Mapping[str, list[Curve]], best: str) -> None:
    targets, seeds = targets_of(curves[best]), len(curves[best])
    for unit, title, digits in (("step", "Steps", 0), ("cpu", "CPU seconds", 1)):
        header = ["", "loss at the end"]
        for target in targets:
            header += [f"to {target:.3f}", "of AdamW's"]
        rows = []
        for optimizer, runs in curves.items():
            row = [optimizer, spread(final(runs), 3)]
            for target in targets:
                times, base = (
                    [reached(run, target, unit) for run in some] for some in (runs, curves[best])
                )
                share = statistics.median(times) / statistics.median(base)
                row += [spread(times, digits), f"{share:.2f}" if math.isfinite(share) else "-"]
            rows.append(row)
        note = f"minimum / median / maximum of {seeds} seeds; medians, of {best}"
        table(f"{title} to a loss: {note}", header, rows)


def draw(axes: Axes, curves: Sequence[Curve], unit: str, **style: object) -> None:
    """The median over the seeds, and the area between the lowest and the highest."""
    points = list(zip(*curves, strict=True))
    x = [statistics.median(p[unit] for p in at) for at in points]
    losses = [[p["loss"] for p in at] for at in points]
    (line,) = axes.plot(x, [statistics.median(at) for at in losses], linewidth=1.3, **style)
    low, high = [min(at) for at in losses], [max(at) for at in losses]
    axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def plot(curves: Mapping[str, list[Curve]], best: str, file: Path) -> None:
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "core-plugin", "font.size": 9}
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axes, (unit, label) in zip(
        panels, (("step", "steps"), ("cpu", "CPU seconds")), strict=True
    ):
        for name, runs in curves.items():
            if name in ADAMW and name != best:
                draw(axes, runs, unit, color="lightgray", zorder=1)
            else:
                draw(axes, runs, unit, label=name, linestyle="--" if name in MISROUTED else "-")
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("loss on text held back")
    panels[0].set_ylim(top=max(point["loss"] for point in curves[best][0][1:]))
    panels[1].legend(title="gray: AdamW at other rates")
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="a multiple of 40")
    parser.add_argument("--plot", type=Path, default=HERE / "muon_convergence.svg")
    options = parser.parse_args()
    print(machine())
    curves = train_all(options.seeds, options.steps)
    best = min(ADAMW, key=lambda name: statistics.median(final(curves[name])))
    print_tables(curves, best)
    plot(curves, best, options.plot)


if __name__ == "__main__":
    main()

"""The time of a training step: core-plugin's loop against the shortest one written by hand.

Both train the built-in decoder with fused AdamW and gradient clipping on one thread a process. A
hook in a real ``core-plugin train`` takes a hand-written step after each of core-plugin's, so both
are measured in the same processes at the same time; the hook's call counts as core-plugin's.
Strategies: one process, and two of DDP and of FSDP2 (gloo).

Goals: at most 1.01 times at the realistic size; at most 0.5 ms more at the smallest one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from common import SCRIPTS, install_plugins, machine, output, ratio, spread, table

if TYPE_CHECKING:
    from collections.abc import Mapping

REALISTIC = {
    "model": {"hidden_size": 256, "layers": 4, "heads": 4},
    "data": {"sequence_length": 256, "vocabulary_size": 2048},
    "batch": 8,
}
SMALLEST = {
    "model": {"hidden_size": 32, "layers": 1, "heads": 1},
    "data": {"sequence_length": 32, "vocabulary_size": 64},
    "batch": 1,
}
PROCESSES = {"none": 1, "ddp": 2, "fsdp2": 2}
WARM_UP = 5


def run_file(sizes: Mapping, strategy: str, steps: int, directory: Path) -> dict:
    """The configuration; the batch is one rank's, at the smallest size, or else that of all."""
    processes = PROCESSES[strategy]
    micro = max(sizes["batch"] // processes, 1)
    return {
        "model": {"name": "decoder", **sizes["model"]},
        "data": {"name": "random-tokens", **sizes["data"]},
        "optimizer": {"name": "adamw"},
        "distributed": strategy,
        "device": "cpu",
        "hooks": [{"name": "by-hand", "path": str(directory / "times.json")}],
        "train": {
            "steps": steps,
            "global_batch_size": micro * processes,
            "micro_batch_size": micro,
            "log_every": 10**6,
        },
        "checkpoint": {"directory": str(directory / "run")},
        "launcher": {"name": "torchrun", "processes_per_host": processes}
        if processes > 1
        else "local",
    }


def measure(sizes: Mapping, strategy: str, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU milliseconds of each step of rank 0, core-plugin's and the hand-written ones."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        file = directory / "run.yaml"
        file.write_text(json.dumps(run_file(sizes, strategy, steps + WARM_UP, directory)))
        output([SCRIPTS / "core-plugin", "train", file], install_plugins(directory))
        times = json.loads((directory / "times.json").read_text())
    return {which: values[WARM_UP:] for which, values in times.items()}


def row(strategy: str, times: Mapping[str, list[tuple[float, float]]]) -> list[str]:
    cells = [f"{strategy}, {PROCESSES[strategy]}"]
    for kind in (0, 1):
        ours, theirs = ([t[kind] for t in times[w]] for w in ("core-plugin", "by hand"))
        over = [a - b for a, b in zip(ours, theirs, strict=True)]
        cells += [spread(ours, 2), spread(theirs, 2), ratio(ours, theirs)]
        cells += [f"{min(ours) - min(theirs):.2f} / {statistics.median(over):.2f}"]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--realistic-steps", type=int, default=30)
    parser.add_argument("--smallest-steps", type=int, default=1000)
    parser.add_argument("--strategies", nargs="+", default=list(PROCESSES), choices=PROCESSES)
    options = parser.parse_args()
    print(machine())
    header = ["strategy, processes"]
    for kind in ("wall", "CPU"):
        header += [f"{kind} ms", f"{kind} ms by hand", f"{kind} ratio", f"{kind} ms more"]
    for size, sizes, steps in (
        ("Smallest", SMALLEST, options.smallest_steps),
        ("Realistic", REALISTIC, options.realistic_steps),
    ):
        rows = [row(strategy, measure(sizes, strategy, steps)) for strategy in options.strategies]
        table(f"{size} size: milliseconds a step, minimum / median of {steps}", header, rows)


if __name__ == "__main__":
    main()

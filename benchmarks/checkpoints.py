"""Saving while training goes on: how long a step waits, with core-plugin and with torch alone.

In one run of two ranks of FSDP2, checkpoints are saved by turns with core-plugin and with torch's
``dcp.save`` and ``dcp.async_save``, which neither hash what they write nor replace it as a whole.

Goals: in the background at most 0.2 of the time that saving at once takes, and no more than torch.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from common import SCRIPTS, install_plugins, machine, output, ratio, spread, table

WAYS = 4
EVERY = 8
"""Steps between two saves."""


def run_file(hidden_size: int, saves: int, directory: Path) -> dict:
    return {
        "model": {"name": "decoder", "hidden_size": hidden_size, "layers": 4, "heads": 8},
        "data": {"name": "random-tokens", "vocabulary_size": 4096, "sequence_length": 64},
        "optimizer": "adamw",
        "distributed": "fsdp2",
        "device": "cpu",
        "hooks": [{"name": "saves", "path": str(directory / "report.json")}],
        "train": {
            "steps": saves * EVERY,
            "global_batch_size": 2,
            "micro_batch_size": 1,
            "log_every": EVERY,
        },
        "checkpoint": {"directory": str(directory / "run"), "every": EVERY, "keep": 1}
        | {"asynchronous": True},
        "launcher": {"name": "torchrun", "processes_per_host": 2},
    }


def measure(hidden_size: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """What rank 0 noted of each way; the first save of each is thrown away."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        file = directory / "run.yaml"
        file.write_text(json.dumps(run_file(hidden_size, WAYS * (repeats + 1), directory)))
        output([SCRIPTS / "core-plugin", "train", file], install_plugins(directory))
        report = json.loads((directory / "report.json").read_text())
    return {what: {way: values[1:] for way, values in of.items()} for what, of in report.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=512)
    options = parser.parse_args()
    print(machine())
    report = measure(options.hidden_size, options.repeats)
    blocked, steps = report["blocked"], report["steps"]
    at_once = blocked["core-plugin"]
    rows = [
        [
            way,
            spread([1e3 * value for value in values], 0),
            ratio(values, at_once),
            spread(steps[way], 0) if way.endswith("background") else "",
        ]
        for way, values in blocked.items()
    ]
    header = ["way", "training waits, ms", "of saving at once", "steps meanwhile"]
    title = f"A save of FSDP2 on two ranks: minimum / median of {options.repeats}"
    table(title, header, rows)


if __name__ == "__main__":
    main()

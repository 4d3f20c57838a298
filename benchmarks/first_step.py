"""The CPU seconds from the command to the end of the first optimizer step, on two ranks of DDP.

``core-plugin train``, whose torchrun launcher starts both ranks, against ``torchrun`` with Hugging
Face's Trainer, on models of the same size with data in memory. Counted is what the launcher and
the ranks have used, user and system, when each rank ends its first step. The second figure is the
whole command with one step; core-plugin's includes a checkpoint, the Trainer's does not.

Goal: at most half of the Trainer's.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from pathlib import Path

from common import (
    HERE,
    SCRIPTS,
    cpu_seconds,
    in_turns,
    install_plugins,
    machine,
    ratio,
    spread,
    table,
)

RANKS = 2
MODEL = {"hidden_size": 64, "intermediate_size": 192, "layers": 2, "heads": 4}
DATA = {"vocabulary_size": 2048, "sequence_length": 64}
MICRO_BATCH_SIZE = 4


def core_plugin_command(directory: Path) -> list[str]:
    run = {
        "model": {"name": "decoder", **MODEL},
        "data": {"name": "random-tokens", **DATA, "samples": 64},
        "optimizer": "adamw",
        "distributed": "ddp",
        "device": "cpu",
        "hooks": [{"name": "first-step", "path": str(directory)}],
        "train": {
            "steps": 1,
            "global_batch_size": RANKS * MICRO_BATCH_SIZE,
            "micro_batch_size": MICRO_BATCH_SIZE,
        },
        "checkpoint": {"directory": str(directory / "run")},
        "launcher": {"name": "torchrun", "processes_per_host": RANKS},
    }
    file = directory / "run.yaml"
    file.write_text(json.dumps(run))
    return [str(SCRIPTS / "core-plugin"), "train", str(file)]


def trainer_command(directory: Path) -> list[str]:
    sizes = json.dumps({**MODEL, **DATA, "micro_batch_size": MICRO_BATCH_SIZE})
    torchrun = [str(SCRIPTS / "torchrun"), "--standalone", f"--nproc_per_node={RANKS}"]
    return [*torchrun, str(HERE / "hf_trainer.py"), sizes, str(directory)]


COMMANDS = {"core-plugin train": core_plugin_command, "torchrun, HF Trainer": trainer_command}


def measure(which: str) -> tuple[float, float]:
    """CPU seconds to the end of the first step, and of the whole command."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        environment = install_plugins(directory)
        whole = cpu_seconds(COMMANDS[which](directory), environment)
        notes = [float((directory / f"rank-{rank}").read_text()) for rank in range(RANKS)]
    return sum(notes), whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(machine())
    variants = {which: functools.partial(measure, which) for which in COMMANDS}
    columns = {
        w: list(zip(*t, strict=True)) for w, t in in_turns(variants, options.repeats).items()
    }
    peer = columns["torchrun, HF Trainer"]
    rows = [
        [which, spread(first, 2), ratio(first, peer[0]), spread(whole, 2), ratio(whole, peer[1])]
        for which, (first, whole) in columns.items()
    ]
    table(
        f"Two ranks of DDP: CPU seconds, minimum / median of {options.repeats}",
        ["command", "to the first step", "of the Trainer's", "whole command", "of its"],
        rows,
    )


if __name__ == "__main__":
    main()

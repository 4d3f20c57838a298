"""The seconds from the loss of a worker (SIGKILL) to the next optimizer step, on two ranks of DDP.

``core-plugin train``, whose torchrun launcher starts the ranks, against the same run under stock
``torchrun`` with its own settings. In turns: start a run, let it save, kill a worker, and wait for
the first step that is taken by new workers. A try in which none is taken in time has failed.

Goal: at most 0.2 of torchrun's time, and no try of core-plugin's fails.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from common import SCRIPTS, in_turns, install_plugins, machine, ratio, spread, table

RANKS = 2
PATIENCE = 180.0


def run_file(directory: Path, launcher: object) -> str:
    run = {
        "model": {"name": "decoder", "hidden_size": 64, "layers": 2, "heads": 4},
        "data": {"name": "random-tokens", "vocabulary_size": 512, "sequence_length": 32},
        "distributed": "ddp",
        "device": {"name": "cpu", "threads": 1},
        "hooks": [{"name": "steps", "path": str(directory / "steps")}],
        "train": {"steps": 1_000_000, "global_batch_size": RANKS},
        "checkpoint": {"directory": str(directory / "run"), "every": 10},
        "launcher": launcher,
    }
    file = directory / "run.yaml"
    file.write_text(json.dumps(run))
    return str(file)


def core_plugin_command(directory: Path) -> list[str]:
    launcher = {"name": "torchrun", "processes_per_host": RANKS, "max_restarts": 3}
    return [str(SCRIPTS / "core-plugin"), "train", run_file(directory, launcher)]


def torchrun_command(directory: Path) -> list[str]:
    torchrun = [str(SCRIPTS / "torchrun"), "--standalone", f"--nproc-per-node={RANKS}"]
    run = ["-m", "core_plugin", "train", run_file(directory, "local")]
    return [*torchrun, "--max-restarts=3", *run]


COMMANDS = {"core-plugin train": core_plugin_command, "torchrun": torchrun_command}


def children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


def steps(directory: Path) -> list[tuple[int, float]]:
    """The process and the time of each step of rank 0, as far as they are written."""
    with contextlib.suppress(FileNotFoundError):
        lines = (directory / "steps").read_text().splitlines()
        return [(int(pid), float(at)) for pid, at in (line.split() for line in lines)]
    return []


def wait_for(directory: Path, process: subprocess.Popen, enough: int, not_of: int = 0) -> bool:
    """Wait for a number of steps; whether the run takes them, in a process that is another one."""
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        if sum(pid != not_of for pid, _ in steps(directory)) >= enough:
            return True
        time.sleep(0.01)
    return False


def measure(which: str) -> float | None:
    """The seconds of one try, or None if it failed."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        process = subprocess.Popen(
            COMMANDS[which](directory),
            env=os.environ | install_plugins(directory),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            if not wait_for(directory, process, enough=25):
                raise SystemExit(f"{which} does not train")
            before, _ = steps(directory)[-1]
            os.kill(next(w for w in children(process.pid) if w != before), signal.SIGKILL)
            killed = time.time()
            if not wait_for(directory, process, enough=1, not_of=before):
                return None
            return next(at for pid, at in steps(directory) if pid != before) - killed
        finally:
            for pid in (*children(process.pid), process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(machine())
    tries = in_turns(
        {which: functools.partial(measure, which) for which in COMMANDS}, options.repeats
    )
    times = {which: [t for t in of_it if t is not None] for which, of_it in tries.items()}
    rows = [
        [
            which,
            f"{len(of_it) - len(times[which])} of {len(of_it)}",
            spread(times[which], 2) if times[which] else "",
            ratio(times[which], times["torchrun"]) if times[which] and times["torchrun"] else "",
        ]
        for which, of_it in tries.items()
    ]
    header = ["launcher", "tries that failed", "seconds to the next step", "of torchrun's"]
    table(f"A worker is lost: minimum / median of {options.repeats}", header, rows)


if __name__ == "__main__":
    main()

"""Runs scenarios in groups of processes: ``fsdp2_group.py``, a JSON list a line on its input.

The list is ``[MODULE, FUNCTION, WORLD_SIZE, ARGUMENT...]``. It starts a gloo group of so many
processes and calls the function with the rank and the arguments on each. For each list one line
comes out: a JSON string that is empty, or what went wrong. The processes are forked, so that torch
is imported once.
"""

import importlib
import json
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch._dynamo  # noqa: F401 (the optimizers import it, which takes long)
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS = 100
"""After which a scenario counts as hung."""


def process(rank: int, module: str, scenario: str, world_size: int, store: str, *arguments) -> None:
    # Of a linear layer that is a group of its own. Nothing here changes its result in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    getattr(importlib.import_module(module), scenario)(rank, *arguments)
    dist.destroy_process_group()


def run(module: str, scenario: str, world_size: int, *arguments: str) -> None:
    importlib.import_module(module)
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        group = mp.start_processes(
            process,
            (module, scenario, world_size, store, *arguments),
            world_size,
            join=False,
            start_method="fork",
        )
        deadline = time.monotonic() + SECONDS
        while not group.join(timeout=1):
            if time.monotonic() > deadline:
                for member in group.processes:
                    member.kill()
                raise TimeoutError(f"{scenario} did not end in {SECONDS} s")


if __name__ == "__main__":
    for line in sys.stdin:
        try:
            run(*json.loads(line))
            fault = ""
        except Exception:
            fault = traceback.format_exc()
        print(json.dumps(fault), flush=True)

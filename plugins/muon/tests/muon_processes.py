"""Runs scenarios in groups of processes: ``muon_processes.py``, a JSON list a line on its input.

The list is ``[MODULE, SCENARIOS, WORLD_SIZE, DIRECTORY]``. The scenarios are functions of the
module; one after the other they are called with the directory on each rank of a gloo group of so
many processes. For each list one line comes out: a JSON string that is empty, or what went wrong.
The processes are forked, so that torch is imported once.
"""

import importlib
import json
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT = 60.0
"""Seconds after which a scenario counts as hung."""

PRELOAD = ("torch._dynamo", "muon_alike", "muon_work", "muon_checkpoints", "muon_training")
"""What takes long to import; the optimizers import dynamo."""


def process(rank: int, module: str, scenarios: list[str], world_size: int, directory: Path) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store-{scenarios[0]}-{world_size}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=LIMIT / 2),
    )
    for scenario in scenarios:
        getattr(importlib.import_module(module), scenario)(directory)
        dist.barrier()
    dist.destroy_process_group()


def launch(module: str, scenarios: list[str], world_size: int, directory: str) -> None:
    group = mp.start_processes(
        process,
        (module, scenarios, world_size, Path(directory)),
        world_size,
        join=False,
        start_method="fork",
    )
    deadline = time.monotonic() + LIMIT
    while not group.join(timeout=1):
        if time.monotonic() > deadline:
            for member in group.processes:
                member.kill()
            raise TimeoutError(f"{module}: {scenarios} did not end in {LIMIT} s")


if __name__ == "__main__":
    for module in PRELOAD:
        importlib.import_module(module)
    for line in sys.stdin:
        try:
            launch(*json.loads(line))
            fault = ""
        except Exception:
            fault = traceback.format_exc()
        print(json.dumps(fault), flush=True)

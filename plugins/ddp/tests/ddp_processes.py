"""Runs scenarios on real ranks: ``ddp_processes.py``, with a scenario and a world size a line.

It imports torch once, and forks the processes of one gloo group for each line. The answer is a line
of JSON: what went wrong, or nothing. A scenario is ``module:function``, called with the rank and
the rest of the line.
"""

import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

LIMIT = 60.0
"""Seconds in which a scenario must have ended on all ranks."""


def _process(rank: int, scenario: str, world_size: int, store: str, rest: list[str]) -> None:
    import torch.distributed as dist

    module, _, function = scenario.partition(":")
    function = getattr(importlib.import_module(module), function)
    if getattr(function, "joins_itself", False):
        function(rank, world_size, *rest)
        return
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=LIMIT / 2),
    )
    function(rank, *rest)
    dist.destroy_process_group()


def joins_itself(scenario):
    """Mark a scenario that makes its process group itself; it gets the world size as well."""
    scenario.joins_itself = True
    return scenario


def _run(scenario: str, world_size: int, rest: list[str]) -> None:
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        ranks = mp.start_processes(
            _process,
            (scenario, world_size, store, rest),
            world_size,
            join=False,
            start_method="fork",
        )
        end = time.monotonic() + LIMIT
        while not ranks.join(timeout=1):
            if time.monotonic() > end:
                for process in ranks.processes:
                    process.kill()
                raise TimeoutError(f"{scenario} did not end in {LIMIT} s")


def serve() -> None:
    for module in (
        "torch._dynamo",  # which DDP imports
        "torch.distributed.checkpoint",
        "core_plugin.training.worker",
        "core_plugin_ddp.exchange",
    ):
        importlib.import_module(module)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what scenarios print is no answer
        for line in sys.stdin:
            scenario, world_size, *rest = line.split()
            failure = ""
            try:
                _run(scenario, int(world_size), rest)
            except Exception:
                failure = traceback.format_exc()
            print(json.dumps(failure), file=answers, flush=True)


if __name__ == "__main__":
    serve()

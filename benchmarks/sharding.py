"""Memory and step time of the strategies: against their peers, on two ranks.

Every variant trains the built-in decoder in processes of its own, with the same loop; what differs
is how the model is made and spread (see ``sharding_peers.py``). Memory is the growth of the
resident set over what the process had before there was a model, on the rank that has more. The
variants take turns.

Goals, against torch's own written by hand: step time and memory at most 1.01 times. FSDP2's start
takes at most 0.6 times DDP's memory.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import in_turns, machine, ratio, spread, table
from sharding_peers import PEERS, VOCABULARY, WORLD_SIZE, on_meta
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from core_plugin.builtin.decoder import Decoder
from core_plugin.tensors import canonical_name
from core_plugin.training.materialize import Materializer
from core_plugin.types import DistributedPlugin
from core_plugin.types.distributed import ShardContext

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

CPU = torch.device("cpu")
WARM_UP = 2
BATCH = (2, 64)


def by_core_plugin(name: str) -> nn.Module:
    strategy, model = DistributedPlugin(name).resolve(), on_meta()
    params = strategy.Params()
    context = ShardContext(
        CPU,
        strategy.create_mesh(params, "cpu", WORLD_SIZE),
        Materializer(model, CPU, 0, Decoder.initialize, canonical_name),
        Decoder.blocks(model),
        torch.float32,
    )
    return strategy.shard_model(model, params, context)


def ways(name: str) -> Mapping[str, Callable[[], nn.Module]]:
    return {"core-plugin": functools.partial(by_core_plugin, name), **PEERS[name]}


def resident(which: str) -> int:
    """MiB of the resident set: now (``VmRSS``), or the most there was (``VmHWM``)."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{which}:\s+(\d+)", status)[1]) / 1024


def measure(make: Callable[[], nn.Module], steps: int) -> dict[str, float]:
    """One rank's part: MiB at most while starting, after it and over all; milliseconds a step."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = resident("VmRSS")
    model = make()
    start, started = resident("VmHWM") - before, resident("VmRSS") - before
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(VOCABULARY, (BATCH[0], BATCH[1] + 1))
    times = []
    for _ in range(steps + WARM_UP):
        dist.barrier()
        began = time.perf_counter(), time.process_time()
        logits = model(tokens[:, :-1])
        cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ended = time.perf_counter(), time.process_time()
        times.append([1e3 * (b - a) for a, b in zip(began, ended, strict=True)])
    wall, cpu = zip(*times[WARM_UP:], strict=True)
    return {
        "start MiB": start,
        "started MiB": started,
        "peak MiB": resident("VmHWM") - before,
        "wall ms": statistics.median(wall),
        "CPU ms": statistics.median(cpu),
    }


def rank_of(rank: int, make: Callable[[], nn.Module], steps: int, directory: str) -> None:
    world = {"RANK": rank, "WORLD_SIZE": WORLD_SIZE, "OMP_NUM_THREADS": 1}
    world |= {f"LOCAL_{key}": world[key] for key in ("RANK", "WORLD_SIZE")}
    os.environ.update({key: str(value) for key, value in world.items()})  # the peers read these
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD_SIZE)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "DTensor random operators")  # torch's, by hand
    result = measure(make, steps)
    (Path(directory) / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def run(make: Callable[[], nn.Module], steps: int) -> Mapping[str, float]:
    """The larger of the ranks' figures."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = (make, steps, directory)
        mp.start_processes(rank_of, arguments, WORLD_SIZE, start_method="fork")
        ranks = [json.loads(f.read_text()) for f in Path(directory).glob("*.json")]
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def compare(name: str, results: Mapping[str, list[Mapping[str, float]]]) -> None:
    """Print a strategy's table: core-plugin, then each peer with core-plugin's ratio to it."""
    header, rows = ["", "core-plugin"], []
    for peer in PEERS[name]:
        header += [peer, "ratio"]
    for key in results["core-plugin"][0]:
        ours = [r[key] for r in results["core-plugin"]]
        row = [key, spread(ours)]
        for peer in PEERS[name]:
            theirs = [r[key] for r in results[peer]]
            row += [spread(theirs), ratio(ours, theirs)]
        rows.append(row)
    size = sum(p.numel() for p in on_meta().parameters()) * 4 / 2**20
    repeats = len(results["core-plugin"])
    title = f"{name}, two ranks, {size:.0f} MiB of parameters: minimum / median of {repeats}"
    table(title, header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--strategies", nargs="+", default=list(PEERS), choices=PEERS)
    options = parser.parse_args()
    print(machine())
    variants = {
        (name, who): functools.partial(run, make, options.steps)
        for name in options.strategies
        for who, make in ways(name).items()
    }
    results = in_turns(variants, options.repeats)
    for name in options.strategies:
        compare(name, {who: found for (of, who), found in results.items() if of == name})


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()

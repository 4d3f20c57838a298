"""Memory and step time of the strategies: against their peers, on two ranks.

All variants train the built-in decoder with the same steps; what differs is how the model is made
and spread (see ``sharding_peers.py``).

Memory is the growth of the resident set, on the rank that has more, in processes of a variant's
own. A small model is trained there first. What that leaves is told apart, as "code": it is there
for modules that are imported and pages of libraries that are touched, whatever the model's size.
The heap gives back at once what is freed: by its default it keeps more than as much again, as
holes, and how much of that depends on chance.

For the time of a step, the models of all variants are in the same processes, and take turns.

Goals, against torch's own written by hand: time and memory at most 1.01 times. While it starts,
FSDP2 has one module whole beside its parts, and at most 0.6 times DDP's memory.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import os
import random
import re
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import machine, ratio, spread, table
from sharding_peers import PEERS, VOCABULARY, WORLD_SIZE, on_meta
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from core_plugin.builtin.decoder import Decoder
from core_plugin.tensors import canonical_name
from core_plugin.training.materialize import Materializer
from core_plugin.types import DistributedPlugin
from core_plugin.types.distributed import ShardContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn

    Make = Callable[[Decoder.Params], nn.Module]

CPU = torch.device("cpu")
SIZE = Decoder.Params(hidden_size=512, layers=8, heads=8)
SMALL = Decoder.Params(hidden_size=64, layers=1, heads=1)
BATCH = (2, 64)
WARM_UP = 4
"""Steps; DDP makes its buckets anew in the second one."""
M_MMAP_THRESHOLD = -3
"""Of ``mallopt``; a threshold that is set no longer grows with what is freed."""


def by_core_plugin(name: str, size: Decoder.Params) -> nn.Module:
    strategy, model = DistributedPlugin(name).resolve(), on_meta(size)
    params = strategy.Params()
    context = ShardContext(
        CPU,
        strategy.create_mesh(params, "cpu", WORLD_SIZE),
        Materializer(model, CPU, 0, Decoder.initialize, canonical_name),
        Decoder.blocks(model),
        torch.float32,
    )
    return strategy.shard_model(model, params, context)


def ways(name: str) -> Mapping[str, Make]:
    return {"core-plugin": functools.partial(by_core_plugin, name), **PEERS[name]}


def training(model: nn.Module) -> Callable[[], None]:
    """What trains a model by a step."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(VOCABULARY, (BATCH[0], BATCH[1] + 1))

    def step() -> None:
        logits = model(tokens[:, :-1])
        cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def memory(make: Make) -> dict[str, float]:
    """One rank's part: MiB for code, and for a model at most while starting, then, and at most."""
    glibc = ctypes.CDLL(None)
    glibc.mallopt(M_MMAP_THRESHOLD, 2**16)
    bare = resident("VmRSS")
    training(make(SMALL))()
    gc.collect()
    glibc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = resident("VmRSS")
    model = make(SIZE)
    start, started = resident("VmHWM") - before, resident("VmRSS") - before
    step = training(model)
    for _ in range(WARM_UP):
        step()
    return {
        "code MiB": before - bare,
        "start MiB": start,
        "started MiB": started,
        "peak MiB": resident("VmHWM") - before,
    }


def resident(which: str) -> float:
    """MiB of the resident set: now (``VmRSS``), or the most there was (``VmHWM``)."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{which}:\s+(\d+)", status)[1]) / 1024


def times(makes: Mapping[str, Make], steps: int) -> dict[str, list[tuple[float, float]]]:
    """One rank's part: the wall and CPU milliseconds of each step of each variant."""
    step = {who: training(make(SIZE)) for who, make in makes.items()}
    found: dict[str, list[tuple[float, float]]] = {who: [] for who in makes}
    order, shuffle = list(makes), random.Random(0).shuffle  # no variant always has the same before
    for _ in range(WARM_UP + steps):
        shuffle(order)
        for who in order:
            found[who].append(timed(step[who]))
    return {who: of[WARM_UP:] for who, of in found.items()}


def timed(step: Callable[[], None]) -> tuple[float, float]:
    dist.barrier()
    began = time.perf_counter(), time.process_time()
    step()
    ended = time.perf_counter(), time.process_time()
    return 1e3 * (ended[0] - began[0]), 1e3 * (ended[1] - began[1])


def on_ranks(part: Callable[[], Any]) -> list[Any]:
    """What each rank's part returns."""
    with tempfile.TemporaryDirectory() as directory:
        mp.start_processes(rank_of, (part, directory), WORLD_SIZE, start_method="fork")
        return [json.loads(f.read_text()) for f in Path(directory).glob("*.json")]


def rank_of(rank: int, part: Callable[[], Any], directory: str) -> None:
    world = {"RANK": rank, "WORLD_SIZE": WORLD_SIZE, "OMP_NUM_THREADS": 1}
    world |= {f"LOCAL_{key}": world[key] for key in ("RANK", "WORLD_SIZE")}
    os.environ.update({key: str(value) for key, value in world.items()})  # the peers read these
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD_SIZE)
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # or else a DTensor's parts would get the same values
    warnings.filterwarnings("ignore", "DTensor random operators")  # torch's, by hand
    (Path(directory) / f"{rank}.json").write_text(json.dumps(part()))
    dist.destroy_process_group()


def memory_rows(name: str, repeats: int) -> dict[str, dict[str, list[float]]]:
    """The larger of the ranks' figures, by row and variant."""
    found = {
        who: [on_ranks(functools.partial(memory, make)) for _ in range(repeats)]
        for who, make in ways(name).items()
    }
    return {
        key: {who: [max(rank[key] for rank in ranks) for ranks in of] for who, of in found.items()}
        for key in found["core-plugin"][0][0]
    }


def time_rows(name: str, repeats: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """The larger of the ranks' figures, by row and variant."""
    makes = ways(name)
    rows: dict[str, dict[str, list[float]]] = {
        key: {who: [] for who in makes} for key in ("wall ms", "CPU ms")
    }
    for _ in range(repeats):
        ranks = on_ranks(functools.partial(times, makes, steps))
        for number, key in enumerate(rows):
            for who, found in rows[key].items():
                steps_of_ranks = zip(*(rank[who] for rank in ranks), strict=True)
                found += [max(step[number] for step in of) for of in steps_of_ranks]
    return rows


def compare(title: str, rows: Mapping[str, Mapping[str, list[float]]]) -> None:
    """Print a table: core-plugin, then each peer with core-plugin's ratio to it."""
    peers = list(next(iter(rows.values())))[1:]
    header = ["", "core-plugin", *(cell for peer in peers for cell in (peer, "ratio"))]
    table(title, header, ([key, *compared(found)] for key, found in rows.items()))


def compared(found: Mapping[str, list[float]]) -> Iterable[str]:
    ours, *others = found.values()
    yield spread(ours)
    for theirs in others:
        yield spread(theirs)
        yield ratio(ours, theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--strategies", nargs="+", default=list(PEERS), choices=PEERS)
    options = parser.parse_args()
    print(machine())
    size = sum(p.numel() for p in on_meta(SIZE).parameters()) * 4 / 2**20
    repeats, steps = options.repeats, options.steps
    for name in options.strategies:
        model = f"{name}, two ranks, {size:.0f} MiB of parameters"
        compare(f"{model}: minimum / median of {repeats}", memory_rows(name, repeats))
        compare(
            f"{model}: minimum / median of {repeats * steps} steps",
            time_rows(name, repeats, steps),
        )


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()

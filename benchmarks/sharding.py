"""Memory and step time of the strategies: against torch's own, written by hand, on two ranks.

Every variant trains the built-in decoder in processes of its own, with the same loop; what differs
is how the model is made and spread. By hand, FSDP2 is sharded on ``meta``, given memory with
``to_empty`` and initialised part by part, which is as sparing as torch can do it. Memory is the
growth of the resident set over what the process had before there was a model, on the rank that has
more. The variants take turns.

Goals: step time and memory at most 1.01 times; FSDP2's start at most 0.6 times DDP's memory.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
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
STRATEGIES = ("ddp", "fsdp2")
WORLD_SIZE, VOCABULARY, WARM_UP = 2, 2048, 2
MODEL = Decoder.Params(hidden_size=512, layers=8, heads=8)
BATCH = (2, 64)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Decoder.build(MODEL, VOCABULARY)


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


def by_hand(name: str) -> nn.Module:
    if name == "ddp":
        model = Decoder.build(MODEL, VOCABULARY)
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    model, mesh = on_meta(), init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for module in model.modules():
        if list(module.parameters(recurse=False)) or list(module.buffers(recurse=False)):
            Decoder.initialize(module)
    return model


def resident(which: str) -> int:
    """MiB of the resident set: now (``VmRSS``), or the most there was (``VmHWM``)."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{which}:\s+(\d+)", status)[1]) / 1024


def measure(make: Callable[[str], nn.Module], name: str, steps: int) -> dict[str, float]:
    """One rank's part: MiB at most while starting, after it and over all; milliseconds a step."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = resident("VmRSS")
    model = make(name)
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


def rank_of(
    rank: int, make: Callable[[str], nn.Module], name: str, steps: int, directory: str
) -> None:
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD_SIZE)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "DTensor random operators")  # torch's, by hand
    result = measure(make, name, steps)
    (Path(directory) / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def run(make: Callable[[str], nn.Module], name: str, steps: int) -> Mapping[str, float]:
    """The larger of the ranks' figures."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = (make, name, steps, directory)
        mp.start_processes(rank_of, arguments, WORLD_SIZE, start_method="fork")
        ranks = [json.loads(f.read_text()) for f in Path(directory).glob("*.json")]
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES)
    options = parser.parse_args()
    print(machine())
    variants = {
        (name, which): functools.partial(run, make, name, options.steps)
        for name in options.strategies
        for which, make in (("core-plugin", by_core_plugin), ("by hand", by_hand))
    }
    results = in_turns(variants, options.repeats)
    rows = []
    for name in options.strategies:
        for key in results[name, "by hand"][0]:
            ours, theirs = ([r[key] for r in results[name, w]] for w in ("core-plugin", "by hand"))
            rows.append([f"{name}, {key}", spread(ours), spread(theirs), ratio(ours, theirs)])
    size = sum(p.numel() for p in on_meta().parameters()) * 4 / 2**20
    title = f"Two ranks, {size:.0f} MiB of parameters: minimum / median of {options.repeats}"
    table(title, ["", "core-plugin", "by hand", "ratio"], rows)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()

"""The time and the memory of an optimizer step: core-plugin-muon against its peers.

A step is a whole one, Muon for the hidden matrices and AdamW for the rest, of a model in the shape
of Llama or of GPT-2, with gradients that are there before. Each measurement has processes of its
own, with one thread each; the variants take turns (see ``muon_peers.py``). All compute in float32;
on one process, ours and torch's are also measured as shipped, on this CPU and as on one without
bfloat16. Under FSDP2 every layer is sharded; for DDP each rank holds everything, as DDP leaves it
after the backward pass.

Wall times are those of the rank that takes longest, CPU times those of the busiest rank. Where
there are more ranks than cores, wall times say little. How far the first update moved the hidden
matrices is compared too: it tells that all compute the same.

Memory is the most that a step has beyond parameters, gradients and the optimizer's state.

Goals: on one process, 1.0 (Llama) and 1.4 (GPT-2) times as fast as torch in float32, and 5 times as
shipped on a CPU without bfloat16; under FSDP2, 1.8 times at 2 ranks and 3.5 times at 4.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import os
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import in_turns, machine, ratio, spread, table
from muon_peers import (
    FLOAT32,
    MODELS,
    OURS,
    PEERS,
    SHIPPED,
    TORCH,
    WITHOUT_UNITS,
    hidden_and_rest,
    make_model,
    set_numbers,
)
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

M_MMAP_THRESHOLD = -3  # of glibc's mallopt


class Case(NamedTuple):
    """What one measurement is of."""

    model: str
    strategy: str
    ranks: int
    optimizer: str
    numbers: str = FLOAT32

    @property
    def place(self) -> str:
        ranks = f"{self.strategy}, {self.ranks} ranks" if self.ranks > 1 else "one process"
        return f"{self.model}, {ranks}"


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def make_gradients(model: nn.Module) -> list[Tensor]:
    """The same for all cases and ranks, laid out as the parameters."""
    generator = torch.Generator().manual_seed(1)
    gradients = []
    for p in model.parameters():
        gradient = torch.randn(p.shape, generator=generator)
        if isinstance(p, DTensor):
            gradient = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
        gradients.append(gradient)
    return gradients


def set_gradients(model: nn.Module, gradients: Sequence[Tensor]) -> None:
    """Anew before each step, since some optimizers write to them."""
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient.clone()


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def measure_time(case: Case, layers: int, steps: int) -> dict[str, float]:
    """Milliseconds of a step, and how far the first one moves this rank's part of the matrices."""
    model = make_model(case.model, layers, case.strategy)
    gradients = make_gradients(model)
    optimizer = PEERS[case.strategy][case.optimizer](model)
    matrices = [local(p.detach()) for p in hidden_and_rest(model)[0]]
    before = [matrix.clone() for matrix in matrices]
    walls, cpus = [], []
    for _ in range(steps):
        set_gradients(model, gradients)
        meet()
        began = time.perf_counter(), time.process_time()
        optimizer.step()
        ended = time.perf_counter(), time.process_time()
        if not walls:
            moved = sum(
                float((m - b).square().sum()) for m, b in zip(matrices, before, strict=True)
            )
        walls.append(1e3 * (ended[0] - began[0]))
        cpus.append(1e3 * (ended[1] - began[1]))
    after_first = slice(1 if steps > 1 else 0, None)
    return {
        "wall": statistics.median(walls[after_first]),
        "cpu": statistics.median(cpus[after_first]),
        "moved": moved if case.strategy == "fsdp2" else moved / case.ranks,
    }


def resident(which: str) -> float:
    """MiB of the resident set: now (``VmRSS``), or the most there was (``VmHWM``)."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{which}:\s+(\d+)", status)[1]) / 1024


def measure_memory(case: Case, layers: int, steps: int) -> dict[str, float]:
    """MiB that a step takes beyond parameters, gradients and state.

    A small model comes first, for what the libraries allocate once.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # so that what is freed is given back
    measure_time(case, 1, 2)
    model = make_model(case.model, layers, case.strategy)
    set_gradients(model, make_gradients(model))
    optimizer = PEERS[case.strategy][case.optimizer](model)
    gc.collect()
    meet()
    before = resident("VmRSS")
    for step in range(steps):
        if step == 1:  # the first made the state
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        optimizer.step()
    hidden, rest = (sum(local(p).nbytes for p in ps) for ps in hidden_and_rest(model))
    return {"MiB": resident("VmHWM") - before - (hidden + 2 * rest) / 2**20}


def rank_of(
    rank: int, measure: Callable, case: Case, layers: int, steps: int, directory: str
) -> None:
    torch.set_num_threads(1)
    if case.ranks > 1:
        store = f"file://{directory}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=case.ranks)
    set_numbers(case.numbers)
    (Path(directory) / f"{rank}.json").write_text(json.dumps(measure(case, layers, steps)))
    if case.ranks > 1:
        dist.destroy_process_group()


def run(measure: Callable, case: Case, layers: int, steps: int) -> dict[str, float]:
    """The largest of the ranks' figures; how far the matrices moved is added up."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = (measure, case, layers, steps, directory)
        mp.start_processes(rank_of, arguments, case.ranks, start_method="fork")
        ranks = [json.loads(f.read_text()) for f in Path(directory).glob("*.json")]
    join = {"moved": sum}
    return {key: join.get(key, max)(rank[key] for rank in ranks) for key in ranks[0]}


def in_turn(
    measure: Callable, cases: Sequence[Case], options: argparse.Namespace
) -> dict[Case, dict[str, list[float]]]:
    """Each case's figures, one of each turn."""
    runs = {c: functools.partial(run, measure, c, options.layers, options.steps) for c in cases}
    results = in_turns(runs, options.repeats)
    return {c: {key: [r[key] for r in found] for key in found[0]} for c, found in results.items()}


def time_rows(times: Mapping[Case, Mapping[str, list[float]]]) -> list[list[str]]:
    """A row for each case: its figures, ours beside it, and it beside ours in one process."""
    rows = []
    for case, found in times.items():
        ours = times[case._replace(optimizer=OURS)]
        alone = times.get(Case(case.model, "none", 1, OURS))
        row = [f"{case.place}, {case.numbers}: {case.optimizer}"]
        for kind in ("wall", "cpu"):
            row += [spread(found[kind]), ratio(found[kind], ours[kind])]
            row += [ratio(alone[kind], found[kind]) if case.ranks > 1 and alone else ""]
        rows.append([*row, f"{(found['moved'][0] / ours['moved'][0]) ** 0.5:.3f}"])
    return rows


def memory_rows(memory: Mapping[Case, Mapping[str, list[float]]]) -> list[list[str]]:
    rows = []
    for case, found in memory.items():
        if case.optimizer == OURS:
            ours, theirs = found["MiB"], memory[case._replace(optimizer=TORCH)]["MiB"]
            rows.append([case.place, spread(ours), spread(theirs), ratio(ours, theirs)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="a multiple of the ranks")
    parser.add_argument("--steps", type=int, default=3, help="the first is not counted")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    options = parser.parse_args()
    print(machine())
    places = [
        (model, strategy, ranks)
        for ranks in options.ranks
        for strategy in (["none"] if ranks == 1 else ["fsdp2", "ddp"])
        for model in options.models
    ]
    cases = [Case(*p, o) for p in places for o in PEERS[p[1]]]
    cases += [Case(*p, o, SHIPPED) for p in places if p[2] == 1 for o in (OURS, TORCH)]
    times = in_turn(measure_time, cases, options)
    slow = [Case(*p, o, WITHOUT_UNITS) for p in places if p[2] == 1 for o in (OURS, TORCH)]
    for case in slow:  # one step each, for torch's takes half a minute
        figures = run(measure_time, case, options.layers, 1)
        times[case] = {key: [value] for key, value in figures.items()}
    header = ["", "wall ms", "ours is faster", "than ours in one process"]
    header += ["CPU ms", *header[2:], "update, of ours"]
    title = f"A step: minimum / median of {options.repeats}"
    table(title, header, time_rows(times))
    places = [place for place in places if place[1:] in (("none", 1), ("fsdp2", 2))]
    memory = in_turn(measure_memory, [Case(*p, o) for p in places for o in (OURS, TORCH)], options)
    title = f"The memory of a step: MiB, minimum / median of {options.repeats}"
    table(title, ["", OURS, TORCH, "ratio"], memory_rows(memory))


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()

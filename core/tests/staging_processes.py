"""What the tests of staged saves run: ``staging_processes.py DIRECTORY``.

On one to four ranks, a model trains on while a thread writes the copies of an earlier moment. What
it wrote is compared with what was saved at that moment. A failed assertion ends the program with an
error.
"""

import sys
import threading
import warnings
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer imports it, in each process anew
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from core_plugin import state

SIZES = (1, 2, 3, 4)


class Net(nn.Module):
    """Tied, with 7 rows that no number of ranks divides, and with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 6)
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, ids):
        self.steps += 1
        return self.head(torch.relu(self.layer(self.embedding(ids))))


def replicated(size: int) -> Net:
    return Net()


def sharded(size: int) -> Net:
    return fully_shard(Net(), mesh=init_device_mesh("cpu", (size,)))


def sharded_in_replicas(size: int) -> Net:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(Net(), mesh=mesh)


def sharded_and_frozen(size: int) -> Net:
    model = Net()
    model.embedding.requires_grad_(False)
    return fully_shard(model, mesh=init_device_mesh("cpu", (size,)))


KINDS = (replicated, sharded, sharded_and_frozen, sharded_in_replicas)


def train(model: Net, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(7)).square().mean().backward()
        optimizer.step()


def what_is_staged_is_of_its_moment(kind, rank: int, size: int, directory: Path) -> None:
    model = kind(size)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train(model, optimizer, 2)
    at_once, staged = (directory / f"{kind.__name__}-{size}-{how}" for how in ("now", "later"))
    if rank == 0:
        at_once.mkdir()
        staged.mkdir()
    group = dist.new_group(backend="gloo")
    include_frozen = kind is not sharded_and_frozen
    write = state.stage(model, optimizer, include_frozen=include_frozen)
    state.save(model, optimizer, at_once, include_frozen=include_frozen)
    writing = threading.Thread(target=write, args=(staged, group))
    writing.start()
    train(model, optimizer, 3)
    writing.join()
    dist.barrier()
    ours, theirs = saved(staged), saved(at_once)
    assert ours.keys() == theirs.keys()
    assert ("model.embedding.weight" in ours) == include_frozen
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert ours["model.steps"][0] == 2
    files = [sorted(p.name for p in path.iterdir()) for path in (staged, at_once)]
    assert files[0] == files[1]
    texts = [(path / state.OPTIMIZER_FILE).read_text() for path in (staged, at_once)]
    assert texts[0] == texts[1]
    assert not any(torch.equal(tensor, ours[name]) for name, tensor in now(model).items())


def saved(directory: Path) -> dict[str, torch.Tensor]:
    metadata = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    tensors = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in metadata.items()}
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        dcp.load(tensors, checkpoint_id=directory, no_dist=True)
    return tensors


def now(model: Net) -> dict[str, torch.Tensor]:
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    return {
        f"model.{n}": getattr(t, "full_tensor", lambda t=t: t)()
        for n, t in model.state_dict().items()
        if n in trained
    }


def _process(rank: int, size: int, directory: Path) -> None:
    store = f"file://{directory / f'store-{size}'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    for kind in KINDS:
        if kind is not sharded_in_replicas or size % 2 == 0:
            what_is_staged_is_of_its_moment(kind, rank, size, directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    for size in SIZES:
        mp.start_processes(_process, (size, Path(sys.argv[1])), size, start_method="fork")

"""What the test of sharded models runs: ``adapter_switch_processes.py WORLD_SIZE``.

Starts the processes of one gloo group; each compares a sharded model with a whole one, in whose
training all samples take part too.
"""

import sys
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from core_plugin.adapters import (
    add_adapter,
    delete_adapter,
    disable_adapters,
    initialize,
    inject,
    per_sample,
    set_adapter,
)
from core_plugin.adapters.layer import AdapterLayer
from core_plugin.adapters.names import base_name
from core_plugin.errors import ConfigError
from core_plugin.tensors import copy_full, reshard
from core_plugin.types.peft import BasePeft, PeftParams

TOKENS = torch.tensor([[0, 5, 2, 5], [8, 1, 5, 3]])


class Params(PeftParams):
    def __init__(self, rows: list[int]) -> None:
        super().__init__([], modules_to_save=["body"])
        object.__setattr__(self, "trainable_token_indices", rows)


class Rows(BasePeft):
    """Has no layers of its own."""

    prefix = "rows_"
    peft_type = "ROWS"

    @staticmethod
    def layers() -> dict[type, type[AdapterLayer]]:
        return {}


class Model(nn.Module):
    """The head is tied to the embedding, whose 9 rows no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 9)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.tokens(tokens)))


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def adapted(m: Model) -> Model:
    inject(m, Rows, Params([5, 2]), "x")
    add_adapter(m, Rows, Params([8, 1]), "y")
    return m


def shard(m: Model) -> Model:
    fully_shard(m.body)
    return fully_shard(m)


def train(m: Model) -> None:
    reshard(m)  # the last forward pass left whole parameters, which no optimizer is to hold
    optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        m(TOKENS).square().sum().backward()
        optimizer.step()


def switching() -> None:
    """A forward pass leaves whole parameters in the model; what is trained changes after it."""
    whole, sharded = adapted(model()), shard(adapted(model()))

    def compare() -> None:
        torch.testing.assert_close(sharded(TOKENS), whole(TOKENS))

    for name in ("x", "y", "x"):
        for m in (whole, sharded):
            set_adapter(m, name)
            train(m)
        compare()
    with torch.no_grad(), disable_adapters(whole), disable_adapters(sharded):
        torch.testing.assert_close(sharded(TOKENS), model()(TOKENS))
        for m in (whole, sharded):
            set_adapter(m, "y")
        compare()
    compare()
    train(whole)
    train(sharded)
    compare()
    names = ["y", "x"]
    with torch.no_grad(), per_sample(whole.eval(), names), per_sample(sharded.eval(), names):
        compare()


def deleting() -> None:
    """Parameters cannot leave a sharded model."""
    m = shard(adapted(model()))
    before = str(m)
    m(TOKENS)
    with pytest.raises(ConfigError, match="the model is sharded; delete adapters before it is"):
        delete_adapter(m, "y")
    assert str(m) == before


def from_meta() -> None:
    """Copies and rows get their values from a base that is sharded."""
    with torch.device("meta"):
        m = Model()
    shard(adapted(m)).to_empty(device="cpu")
    for name, parameter in m.named_parameters():
        if "token_adapter" in name or "modules_to_save" in name:
            torch.nn.init.constant_(parameter, 7)
        else:
            copy_full(parameter, model().get_parameter(base_name(name)).detach())
    initialize(m)
    torch.testing.assert_close(m(TOKENS), model()(TOKENS))
    train(m)
    whole = adapted(model())
    train(whole)
    torch.testing.assert_close(m(TOKENS), whole(TOKENS))


def scenarios(rank: int, world_size: int, store: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    try:
        switching()
        deleting()
        from_meta()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        arguments = (int(sys.argv[1]), f"file://{directory}/store")
        mp.start_processes(scenarios, arguments, int(sys.argv[1]), start_method="fork")

"""What the test of sharded merges runs: ``adapter_merge_processes.py WORLD_SIZE``.

Each process of one gloo group merges and unmerges adapters of a model that is sharded over them,
and compares with the whole model. Any failed assertion ends the program with an error.
"""

import dataclasses
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from core_plugin.adapters import disable_adapters, inject, merge, unload, unmerge
from core_plugin.adapters.layer import AdapterLayer, AdapterParameters
from core_plugin.errors import ConfigError
from core_plugin.tensors import gather, local
from core_plugin.types.peft import BasePeft, PeftParams

X = torch.arange(9).reshape(3, 3)


@dataclasses.dataclass(frozen=True)
class Params(PeftParams):
    trainable_token_indices: dict[str, list[int]] | None = None


class RankLayer(AdapterLayer):
    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.rank_A = AdapterParameters(nn.init.normal_)
        self.rank_B = AdapterParameters(nn.init.normal_)

    def add_adapter(self, name: str, params: PeftParams) -> None:
        self.rank_A.add(name, (3, self.base_layer.in_features), self.base_layer)
        self.rank_B.add(name, (self.base_layer.out_features, 3), self.base_layer)

    def merge_into(self, tensors: dict[str, Tensor], name: str) -> None:
        assert not isinstance(tensors["weight"], DTensor)
        tensors["weight"].addmm_(self.rank_B[name], self.rank_A[name], alpha=0.5)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        for name in self.used:
            update = self.rank_B[name] @ self.rank_A[name]
            result = result + 0.5 * nn.functional.linear(x, update.to(x.dtype))
        return result


class Rank(BasePeft):
    """Low-rank updates."""

    Params = Params
    peft_type = "RANK"
    prefix = "rank_"

    @staticmethod
    def layers() -> dict[type[nn.Module], type[AdapterLayer]]:
        return {nn.Linear: RankLayer}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 6)
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 5, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.tokens(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def whole(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    model = Model().to(dtype)
    params = Params(
        target_modules=["first", "up", "down"],
        modules_to_save=["head"],
        trainable_token_indices={"tokens": [1, 4]},
    )
    inject(model, Rank, params)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return model


def sharded(dtype: torch.dtype = torch.float32) -> Model:
    model = whole(dtype)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: gather(p.detach()).clone() for n, p in model.named_parameters()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def sharded_weights_are_merged_as_whole_ones() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for keep in (True, False):
            reference, model = whole(dtype), sharded(dtype)
            merge(reference, keep=keep)
            merge(model, keep=keep)
            assert_equal(weights(model), weights(reference))
            assert all(isinstance(p, DTensor) for p in model.parameters())


def after_a_forward_pass_which_leaves_whole_ones() -> None:
    model = sharded()
    before = weights(model)
    expected = model(X)
    assert not isinstance(model.first.base_layer.weight, DTensor)
    merge(model)
    for _ in range(2):
        torch.testing.assert_close(model(X), expected)
    unmerge(model)
    assert_equal(weights(model), before)
    assert torch.equal(model(X), expected)


def what_is_merged_can_be_put_aside() -> None:
    model = sharded()
    before = weights(model)
    with disable_adapters(model):
        plain = model(X)
    merge(model)
    merged, after = model(X), weights(model)
    with disable_adapters(model):
        assert torch.equal(model(X), plain)
        assert_equal(weights(model), before)
    assert torch.equal(model(X), merged)
    assert_equal(weights(model), after)


def gradients_flow_after_unmerging() -> None:
    model = sharded()
    merge(model, safe=True)
    model(X)
    unmerge(model)
    model(X).square().sum().backward()
    reference = whole()
    reference(X).square().sum().backward()
    expected = reference.first.rank_B["default"].grad
    torch.testing.assert_close(gather(model.first.rank_B["default"].grad), expected)


def no_rank_merges_what_is_not_finite_on_one() -> None:
    model = sharded()
    if dist.get_rank() == 1:
        local(model.blocks[1].down.rank_B["default"].detach())[0, 0] = torch.inf
    before = weights(model)
    with pytest.raises(ConfigError, match=r"blocks\.1\.down\.weight infinite"):
        merge(model, safe=True)
    assert_equal(weights(model), before)


def unloaded_models_stay_sharded() -> None:
    model = sharded()
    expected = model(X)
    unload(model)
    assert [*dict(model.named_parameters())] == [*dict(Model().named_parameters())]
    torch.testing.assert_close(model(X), expected)


def a_shared_weight_cannot_change_for_one_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    inject(model, Rank, Params(target_modules=["0"]))
    with pytest.raises(ConfigError, match=r"0\.weight is shared and sharded"):
        merge(fully_shard(model))


def scenarios(rank: int, world_size: int, store: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    sharded_weights_are_merged_as_whole_ones()
    after_a_forward_pass_which_leaves_whole_ones()
    what_is_merged_can_be_put_aside()
    gradients_flow_after_unmerging()
    no_rank_merges_what_is_not_finite_on_one()
    unloaded_models_stay_sharded()
    a_shared_weight_cannot_change_for_one_module()
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as temporary:
        arguments = (world_size, str(Path(temporary) / "store"))
        mp.start_processes(scenarios, arguments, world_size, start_method="fork")

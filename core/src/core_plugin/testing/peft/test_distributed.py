"""Two ranks: with a whole model each, and with one that is sharded over both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from core_plugin import state, tensors
from core_plugin.adapters import base_name, initialize, inject, load_adapter, save_adapter
from core_plugin.errors import ConfigError
from core_plugin.testing.checks import (
    assert_all_near,
    assert_near,
    assert_same,
    gradients,
    snapshot,
    trained_values,
)
from core_plugin.testing.peft.models import Models, seeded
from core_plugin.testing.peft.networks import blocks
from core_plugin.testing.peft.test_training import loss

RANKS = 2

pytestmark = [pytest.mark.level(3), pytest.mark.ranks(RANKS)]


def _optimizer(model: nn.Module) -> AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    # A larger eps than usual, since Adam blows the rounding errors of tiny gradients up.
    return AdamW(trained, lr=0.02, eps=1e-2)


def _step(model: nn.Module, optimizer: Optimizer, ids: Tensor) -> None:
    optimizer.zero_grad()
    loss(model, ids).backward()
    optimizer.step()


def _trained(model: nn.Module, ids: Tensor, steps: int = 2) -> Optimizer:
    optimizer = _optimizer(model)
    for _ in range(steps):
        _step(model, optimizer, ids)
    return optimizer


def _alone(models: Models) -> nn.Module:
    """What one process makes of the whole batch."""
    model = models.adapted().train()
    _trained(model, models.ids())
    return model


def _share(models: Models, rank: int) -> Tensor:
    return models.ids().chunk(RANKS)[rank]


def _sharded(model: nn.Module) -> nn.Module:
    for part in (*blocks(model), model):
        fully_shard(part)
    return model


def _assert_as_alone(model: nn.Module, models: Models) -> None:
    alone = _alone(models)
    assert_all_near(gradients(model), gradients(alone), 1e-3)
    assert_all_near(trained_values(model), trained_values(alone))


def test_data_parallel_training_is_that_of_one_process(models: Models, rank: int) -> None:
    """DistributedDataParallel gives gradients and adapters as one process does."""
    model = models.adapted().train()
    _trained(DistributedDataParallel(model), _share(models, rank))
    _assert_as_alone(model, models)


def test_sharded_training_is_that_of_one_process(models: Models, rank: int) -> None:
    """Sharded after the injection, a model gives gradients and adapters as one process does."""
    model = _sharded(models.adapted().train())
    assert all(isinstance(p, DTensor) for p in model.parameters())
    _trained(model, _share(models, rank))
    _assert_as_alone(model, models)


def test_a_sharded_model_in_bfloat16(models: Models, rank: int) -> None:
    """A base in bfloat16 and its float32 adapter are sharded together, and trained."""
    model = _sharded(models.adapted(models.network(dtype=torch.bfloat16)).train())
    alone = models.adapted(models.network(dtype=torch.bfloat16)).train()
    loss(model, _share(models, rank)).backward()
    loss(alone, models.ids()).backward()
    actual, expected = gradients(model), gradients(alone)
    assert {g.dtype for g in actual.values()} == {torch.float32}
    distance = torch.stack([torch.dist(actual[n], expected[n]) for n in expected]).norm()
    whole = torch.stack([g.norm() for g in expected.values()]).norm()
    assert distance < 0.1 * whole, f"gradients are off by {distance / whole:.1%}"


def test_whole_tensors_are_saved(models: Models, rank: int, directory: Path) -> None:
    """An adapter of a sharded model is saved as that of one process: every rank's part is there."""
    model = _sharded(models.adapted())
    tensors = state.full_state_dict(model, trainable=True)
    if rank == 0:
        save_adapter(directory / "sharded", model, tensors=tensors)
        save_adapter(directory / "alone", models.adapted())
        for file in (directory / "alone").iterdir():
            assert (directory / "sharded" / file.name).read_bytes() == file.read_bytes(), file.name


def test_files_are_loaded_into_a_sharded_model(models: Models, rank: int, directory: Path) -> None:
    """Files are read into a sharded model, each rank its part."""
    if rank == 0:
        save_adapter(directory, models.adapted())
    dist.barrier()
    model = _sharded(models.adapted(seed=5))
    load_adapter(model, directory)
    expected = models.adapted()
    for name, value in trained_values(model).items():
        assert_same(value, expected.get_parameter(name).detach(), name)
    assert_near(model(models.ids()), expected(models.ids()))


def test_training_goes_on_from_a_checkpoint(models: Models, rank: int, directory: Path) -> None:
    """Adapter and optimizer of a sharded model are saved without the base, and go on exactly."""
    ids = _share(models, rank)
    model = _sharded(models.adapted().train())
    optimizer = _trained(model, ids)
    state.save(model, optimizer, directory, include_frozen=False)
    _step(model, optimizer, ids)
    again = _sharded(models.adapted(seed=5).train())
    resumed = _optimizer(again)
    state.load(again, resumed, directory, include_frozen=False)
    _step(again, resumed, ids)
    expected = trained_values(model)
    for name, value in trained_values(again).items():
        assert_same(value, expected[name], name)


def test_a_model_from_meta_is_sharded_before_it_has_memory(models: Models, rank: int) -> None:
    """Sharded on ``meta`` and filled then, an adapter is new, whole, and one on all ranks."""
    with torch.device("meta"):
        model = models.network()
    inject(model, models.method, models.targeted)
    _sharded(model).to_empty(device="cpu")
    values = snapshot(models.network())
    for name, tensor in model.state_dict(keep_vars=True).items():
        of_base = values.get(base_name(name))
        if of_base is None:
            tensors.local(tensor).detach().fill_(torch.nan)
        else:
            tensors.copy_full(tensor, of_base)
    with seeded(0):
        initialize(model)
    output = model(models.ids())
    assert output.isfinite().all()
    if models.changes_layers:
        assert_near(output, models.network()(models.ids()))
    for name, value in trained_values(model).items():
        others: list[Any] = [None] * RANKS
        dist.all_gather_object(others, value)
        for other in others:
            assert_same(other, value, name)


def test_a_sharded_model_is_refused(models: Models) -> None:
    """An injection into a model that is sharded already is refused, and changes nothing."""
    model = _sharded(models.network())
    before = dict(model.named_modules())
    with pytest.raises(ConfigError, match="shard"):
        inject(model, models.method, models.targeted)
    assert dict(model.named_modules()) == before

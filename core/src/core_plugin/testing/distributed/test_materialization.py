"""A model from ``meta``: every tensor has its values, its place and its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core_plugin import tensors
from core_plugin.testing.checks import assert_same
from core_plugin.testing.distributed.alone import alone
from core_plugin.testing.distributed.loop import CPU, Loop, gathered, values
from core_plugin.testing.distributed.networks import Network, on_meta
from core_plugin.testing.distributed.subject import join
from core_plugin.testing.distributed.worlds import worlds
from core_plugin.training.dry_run import fake_ranks

pytestmark = pytest.mark.level(1)

EACH_KIND = pytest.mark.parametrize("kind", ["tied", "two_dtypes"])


def _held(model: nn.Module) -> int:
    return sum(tensors.local(p).numel() for p in model.parameters())


@EACH_KIND
@worlds(1, 2)
def test_values_are_those_of_one_process(loop: Loop, kind: str, world_size: int) -> None:
    """Parameters and persistent buffers have the values that one process gives them."""
    actual, expected = loop.values(loop.model(kind)), values(alone(kind))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(actual[name], value, name)


@worlds(3, 4)
def test_values_on_more_ranks(loop: Loop, world_size: int) -> None:
    """On more ranks they are the same, though these do not divide the rows."""
    actual = loop.values(loop.model("tied"))
    for name, value in values(alone("tied")).items():
        assert_same(actual[name], value, name)


@worlds(1, 2)
def test_buffers_have_their_values(loop: Loop, world_size: int) -> None:
    """Buffers are whole and computed, also those that no state dict has."""
    buffers = dict(loop.unwrapped(loop.model()).named_buffers())
    expected = dict(alone().named_buffers())
    assert buffers.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(buffers[name], value, name)


@EACH_KIND
@worlds(1, 2)
def test_nothing_is_left_on_meta(loop: Loop, kind: str, world_size: int) -> None:
    """Parameters are where the strategy says that they stay, and buffers on the device."""
    model = loop.unwrapped(loop.model(kind))
    for name, parameter in model.named_parameters():
        assert parameter.device == loop.holder, f"{name} is on {parameter.device}"
    for name, buffer in model.named_buffers():
        assert buffer.device == CPU, f"{name} is on {buffer.device}"


@contextmanager
def _as_one_of(loop: Loop, rank: int, ranks: int) -> Iterator[Loop]:
    """What a dry run does on a rank: a group that exchanges nothing, instead of the process's own.

    The one that it has by itself is made anew.
    """
    dist.destroy_process_group()
    try:
        with fake_ranks(rank, ranks):
            yield Loop(loop.strategy, loop.params, rank, ranks)
    finally:
        join(dist.HashStore(), loop.rank, loop.world_size)
        vars(loop).pop("mesh", None)  # it was of the group that is gone


@pytest.mark.only("several")
@pytest.mark.parametrize("kind", ["tied", "adapted"])
def test_a_dry_run_leaves_all_on_meta(loop: Loop, kind: str) -> None:
    """A model can be spread by a ``materialize`` that does nothing: no value is looked at."""
    for rank in (0, 3):
        with _as_one_of(loop, rank, 4) as dry:
            model = dry.unwrapped(dry.shard(on_meta(kind), lambda part: None))
            for name, tensor in tensors.model_tensors(model).items():
                assert tensors.local(tensor).is_meta, f"{name} is on {tensor.device}"


@pytest.mark.parametrize("kind", ["tied"])
@worlds(1, 2)
def test_names_are_the_architectures(loop: Loop, kind: str, world_size: int) -> None:
    """The unwrapped model has the architecture's own names, in its order."""
    model, expected = loop.unwrapped(loop.model(kind)), on_meta(kind)
    for names in (Network.named_parameters, Network.named_buffers):
        found = [tensors.canonical_name(name) for name, _ in names(model)]
        assert found == [name for name, _ in names(expected)]
    assert [tensors.canonical_name(n) for n in model.state_dict()] == list(expected.state_dict())


@pytest.mark.parametrize("kind", ["frozen", "two_dtypes"])
@worlds(1, 2)
def test_dtypes_and_flags_are_kept(loop: Loop, kind: str, world_size: int) -> None:
    """Parameters and buffers keep their dtypes and shapes, and whether they are trained."""
    model, expected = loop.unwrapped(loop.model(kind)), on_meta(kind)
    actual = tensors.model_tensors(model)
    for name, tensor in tensors.model_tensors(expected).items():
        told = actual[name].dtype, actual[name].shape, actual[name].requires_grad
        assert told == (tensor.dtype, tensor.shape, tensor.requires_grad), name


@worlds(1, 2)
def test_float32_stays_when_computing_in_bfloat16(loop: Loop, world_size: int) -> None:
    """Parameters and buffers stay in float32 when the run computes in bfloat16."""
    model = loop.unwrapped(loop.model("single_precision", computed=torch.bfloat16))
    of = {t.dtype for t in [*model.parameters(), *model.buffers()]}
    assert of == {torch.float32}


@worlds(1, 2)
def test_tied_weights_are_one(loop: Loop, world_size: int) -> None:
    """A head that has the embedding's weight still has it."""
    model = loop.unwrapped(loop.model("tied"))
    assert model.head.weight is model.embedding.weight
    assert len(list(model.parameters())) == len(list(on_meta("tied").parameters()))


@worlds(2)
def test_another_seed_gives_other_values(loop: Loop, world_size: int) -> None:
    """The values are the run's: another seed gives others, equal on all ranks."""
    first, second = (loop.values(loop.model(seed=seed))["head.weight"] for seed in (0, 1))
    assert not torch.equal(first, second)
    for other in gathered(second):
        assert_same(other, second)


@pytest.mark.requires("sharded_state")
@worlds(2, 3)
def test_each_rank_holds_a_part(loop: Loop, world_size: int) -> None:
    """A rank holds less than the whole model; all ranks together hold it, once a replica."""
    for kind in ("tied", "frozen", "two_dtypes"):
        whole = sum(p.numel() for p in on_meta(kind).parameters())
        held = gathered(_held(loop.unwrapped(loop.model(kind))))
        if max(held) >= whole:
            raise RuntimeError(f"of {whole} elements, the ranks hold {held}")
        assert sum(held) % whole == 0, f"of {whole} elements, the ranks hold {held}"

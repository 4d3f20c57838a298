"""What a strategy says of itself, and of a model before there is memory for it."""

import dataclasses
import math

import pytest
import torch

from core_plugin import contract
from core_plugin.testing.children import run_python
from core_plugin.testing.distributed.loop import CPU, Loop
from core_plugin.testing.distributed.networks import on_meta
from core_plugin.testing.distributed.worlds import worlds
from core_plugin.types.distributed import BaseDistributed, Capabilities, MemoryPlan

pytestmark = pytest.mark.level(1)


def test_the_entry_points_module_does_not_import_torch(strategy: type[BaseDistributed]) -> None:
    """Importing the module that the entry point names imports no torch."""
    program = "import sys, importlib; importlib.import_module(sys.argv[1])"
    run_python(f"{program}; assert 'torch' not in sys.modules", strategy.__module__)


def test_parameters_have_defaults(strategy: type[BaseDistributed]) -> None:
    """``Params`` is a frozen dataclass that can be made without arguments."""
    params = strategy.Params()
    for field in dataclasses.fields(params):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(params, field.name, None)


def test_methods_are_static_or_class_methods(strategy: type[BaseDistributed]) -> None:
    """Every method can be called on the class, with the arguments of the contract."""
    assert not contract.faults(strategy, BaseDistributed)
    assert isinstance(strategy.capabilities, Capabilities)


def test_the_divisor_is_a_number(strategy: type[BaseDistributed], loop: Loop) -> None:
    """``gradient_divisor`` gives a positive number for any number of ranks."""
    for ranks in range(1, 5):
        divisor = strategy.gradient_divisor(loop.params, ranks)
        assert divisor > 0, f"{divisor} for {ranks} ranks"
        assert math.isfinite(divisor), f"{divisor} for {ranks} ranks"


def test_parameters_have_a_place(strategy: type[BaseDistributed], loop: Loop) -> None:
    """``parameter_device`` gives the device of the run, or the host."""
    assert strategy.parameter_device(loop.params, CPU) == CPU
    other = torch.device("meta")
    assert strategy.parameter_device(loop.params, other) in (other, CPU)


@worlds(1, 2)
def test_the_mesh_is_of_all_ranks(loop: Loop, world_size: int) -> None:
    """``create_mesh`` gives a mesh of all ranks, or None."""
    assert loop.mesh is None or loop.mesh.size() == world_size


def test_memory_is_planned(loop: Loop) -> None:
    """A plan has the bytes of what a rank holds: less of a frozen model, less if it is sharded."""
    plan = loop.strategy.plan_memory
    whole, frozen = (plan(on_meta(kind), loop.params, 1) for kind in ("plain", "frozen"))
    elements = sum(p.numel() for p in on_meta("plain").parameters())
    assert isinstance(whole, MemoryPlan)
    assert whole.parameters >= 4 * elements
    assert whole.gradients >= 4 * elements
    assert frozen.parameters == whole.parameters
    assert 0 < frozen.gradients < whole.gradients
    assert 0 < frozen.optimizer < whole.optimizer


@pytest.mark.requires("sharded_state")
def test_a_plan_has_less_on_more_ranks(loop: Loop) -> None:
    """A rank of four is planned to hold less than one alone."""
    plan = loop.strategy.plan_memory
    alone, shared = (plan(on_meta("plain"), loop.params, ranks) for ranks in (1, 4))
    if shared.total >= alone.total:
        raise RuntimeError(f"{shared.total} bytes are planned on each of 4 ranks, as on one alone")
    assert shared.total * 4 >= alone.total

"""When the hardware is initialised: not before it is used, and once in a process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

import pytest
import torch

from core_plugin.devices import parse_device
from core_plugin.testing.children import RAISED, RETURNED, exit_code_of_fork
from core_plugin.testing.device.subject import Subject
from core_plugin.testing.device.values import assert_equal, synchronize
from core_plugin.types import PrivateUse1Device

pytestmark = pytest.mark.level(1)

USES: dict[str, Callable[[torch.device], object]] = {
    "allocating": lambda device: torch.ones(2, device=device),
    "setting the device": lambda device: torch.get_device_module(device).set_device(0),
    "asking for it": lambda device: torch.get_device_module(device)._lazy_init(),
    "waiting": synchronize,
    "a random state": lambda device: torch.get_device_module(device).get_rng_state(),
    "random numbers": lambda device: torch.rand(2, device=device),
    "copying to it": lambda device: torch.ones(2).to(device),
}


@pytest.mark.fresh
@pytest.mark.only("privateuse1")
def test_nothing_is_initialised_before_the_first_use(subject: Subject) -> None:
    """Registering, parsing, printing and counting leave the hardware alone."""
    subject.implementation.register(subject.params)
    device = parse_device(f"{subject.name}:0")
    module = torch.get_device_module(device)
    print(device, module.device_count(), module.is_available(), module.get_amp_supported_dtype())
    assert torch.accelerator.current_accelerator() == torch.device(device.type)
    assert not module._is_in_bad_fork()
    assert _initializations(subject) == 0
    assert not module.is_initialized()


@pytest.mark.fresh
@pytest.mark.only("privateuse1")
@pytest.mark.parametrize(
    "first", ["setting the device", "asking for it", "waiting", "a random state"]
)
def test_the_first_use_initialises_once(subject: Subject, first: str) -> None:
    """Whatever comes first, and whatever comes after, the hardware is initialised once."""
    subject.implementation.register(subject.params)
    device = torch.device(subject.backend.name, 0)
    USES[first](device)
    assert _initializations(subject) <= 1, f"initialised {_initializations(subject)} times"
    for use in USES.values():
        use(device)
    subject.implementation.device(subject.params, 0)
    assert_equal(torch.ones(2, device=device), torch.ones(2), on=device)
    assert _initializations(subject) == 1, f"initialised {_initializations(subject)} times"
    assert torch.get_device_module(device).is_initialized()


@pytest.mark.fresh
@pytest.mark.only("privateuse1")
def test_an_allocation_initialises(subject: Subject) -> None:
    """After the first tensor, and not later, the hardware counts as initialised."""
    subject.implementation.register(subject.params)
    torch.empty(2, device=torch.device(subject.backend.name))
    assert _initializations(subject) == 1, f"initialised {_initializations(subject)} times"
    assert torch.get_device_module(subject.backend.name).is_initialized()


@pytest.mark.fresh
@pytest.mark.only("privateuse1")
def test_threads_initialise_once(subject: Subject) -> None:
    """Eight threads that use the device first, at once, initialise it once, and all can use it."""
    name = subject.implementation.register(subject.params).name
    start = threading.Barrier(8)

    def use(number: int) -> float:
        start.wait()
        return torch.full((2,), float(number), device=name).sum().item()

    with ThreadPoolExecutor(8) as threads:
        sums = list(threads.map(use, range(8)))
    assert sums == [2.0 * number for number in range(8)], sums
    assert _initializations(subject) == 1, f"initialised {_initializations(subject)} times"


@pytest.mark.fresh
def test_a_fork_works_or_is_refused(device: torch.device) -> None:
    """In a process forked after the first use, the device works or refuses; it never crashes."""
    before = torch.ones(2, device=device)
    code = exit_code_of_fork(partial(_check_a_sum, device))
    assert code in (RETURNED, RAISED), f"the forked process ended with {code}"
    assert_equal(before + 1, torch.full((2,), 2.0), on=device)


@pytest.mark.fresh
@pytest.mark.only("privateuse1")
def test_a_fork_before_the_first_use_works(subject: Subject) -> None:
    """A device that is registered but was not used is there for forked processes."""
    device = torch.device(subject.implementation.register(subject.params).name, 0)

    def use() -> None:
        _check_a_sum(device)
        assert _initializations(subject) == 1, f"initialised {_initializations(subject)} times"

    code = exit_code_of_fork(use)
    assert code == RETURNED, f"the forked process ended with {code}"
    assert _initializations(subject) == 0


def _initializations(subject: Subject) -> int:
    return cast(type[PrivateUse1Device], subject.implementation).initializations()


def _check_a_sum(device: torch.device) -> None:
    found = torch.arange(4, device=device).sum().item()
    assert found == 6, f"0 + 1 + 2 + 3 is {found}"

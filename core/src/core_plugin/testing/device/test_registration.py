"""How a device gets into a process: its package's import, torch's slot, and who else wants it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from core_plugin import discovery, privateuse1
from core_plugin.errors import PluginConflictError, PluginContractError
from core_plugin.privateuse1 import DeviceBackend, requirements
from core_plugin.privateuse1.registration import FREE
from core_plugin.testing.children import run_python
from core_plugin.testing.device.subject import Subject
from core_plugin.testing.device.values import assert_equal
from core_plugin.types import DevicePlugin, PrivateUse1Device

pytestmark = pytest.mark.level(1)

IMPORTED = """
import importlib, sys
importlib.import_module({module!r})
assert "torch" not in sys.modules, "it imports torch"
import torch
slot = torch._C._get_privateuse1_backend_name()
assert slot == "privateuseone", f"it puts {{slot}} into torch's slot"
"""
PARSED = """
from core_plugin.devices import parse_device
from core_plugin.types import DevicePlugin
device = parse_device({name!r})
print(device, DevicePlugin({name!r}).resolve().initializations())
"""
ORDERS = {
    "torch first": ("import torch, {module}", True),
    "the plugin first": ("import {module}, torch", True),
    "core first": ("import core_plugin.devices, torch, {module}", False),
}
"""What is imported, and whether torch loads the extensions that are installed for it."""


@pytest.mark.only("privateuse1")
@pytest.mark.offline
def test_importing_the_package_does_nothing(subject: Subject) -> None:
    """Importing the entry point's module neither imports torch nor fills torch's slot."""
    module = subject.implementation.__module__
    run_python(IMPORTED.format(module=module))


@pytest.mark.only("privateuse1")
@pytest.mark.timeout_s(90)
@pytest.mark.parametrize("order", ORDERS)
def test_imports_in_any_order(subject: Subject, order: str) -> None:
    """Torch and the package can be imported in any order, with and without torch's autoload."""
    imports, autoload = ORDERS[order]
    code = imports.format(module=subject.implementation.__module__) + PARSED
    printed = run_python(code.format(name=subject.name), autoload=autoload, seconds=80)
    assert printed.split() == [subject.backend.name, "0"], printed


@pytest.mark.offline
def test_the_entry_point_names_one_implementation(subject: Subject) -> None:
    """One distribution has the device's name, and what it says of itself does not change."""
    installed = discovery.scan().group("core_plugin.device")
    named = [c for c in installed if c.name == subject.name and not c.shadowed_by]
    assert len(named) == 1, f"{subject.name} is in {', '.join(map(str, named)) or 'none'}"
    implementation = named[0].entry_point.load()
    assert implementation is DevicePlugin(subject.name).resolve()
    assert implementation.backend(subject.params) == subject.backend


@pytest.mark.fresh
@pytest.mark.offline
@pytest.mark.only("privateuse1")
def test_the_runtime_leaves_the_slot_alone(subject: Subject) -> None:
    """Loading the runtime does not name torch's slot, even if it fails: core does that, after."""
    implementation = cast(type[PrivateUse1Device], subject.implementation)
    try:
        module = implementation.load_runtime(subject.params)
    finally:
        slot = torch._C._get_privateuse1_backend_name()
        assert slot == FREE, f"the runtime has put {slot!r} into torch's slot"
    assert not hasattr(torch, subject.backend.name), "the runtime has registered torch.<name>"
    assert isinstance(module, ModuleType)
    assert not requirements.missing_functions(module, subject.capabilities)


@pytest.mark.fresh
@pytest.mark.offline
@pytest.mark.only("privateuse1")
def test_what_is_required_is_there(subject: Subject) -> None:
    """A registered device has all functions, kernels and C++ parts that every device must have."""
    name = subject.implementation.register(subject.params).name
    module = torch.get_device_module(name)
    assert requirements.missing_functions(module, subject.capabilities) == []
    assert list(requirements.missing_kernels()) == []
    assert requirements.has_hooks()
    assert torch.accelerator.current_accelerator() == torch.device(name)


@pytest.mark.fresh
@pytest.mark.offline
def test_registering_again_gives_the_same(subject: Subject) -> None:
    """Eight threads that register a device at once, and one that does later, get one result."""
    start = threading.Barrier(8)

    def register() -> DeviceBackend:
        start.wait()
        return subject.implementation.register(subject.params)

    with ThreadPoolExecutor(8) as threads:
        results = [f.result() for f in [threads.submit(register) for _ in range(8)]]
    assert set(results) == {subject.backend}
    module = torch.get_device_module(subject.backend.name)
    assert subject.implementation.register(subject.params) == subject.backend
    assert torch.get_device_module(subject.backend.name) is module


@pytest.mark.fresh
@pytest.mark.only("privateuse1")
def test_a_second_device_is_refused(device: torch.device, subject: Subject) -> None:
    """Another device cannot take the slot: both are named, and the first goes on working."""
    kept = torch.arange(3, device=device)
    called: list[object] = []

    class Second(_Other):
        load_runtime = _noting(called)

    with pytest.raises(PluginConflictError) as raised:
        Second.register(Second.Params())
    provider = f"{subject.implementation.__module__}:{subject.implementation.__qualname__}"
    for part in (device.type, _OTHER.name, provider, Second.__qualname__):
        assert part in str(raised.value), f"the message lacks {part}: {raised.value}"
    assert not called, "the second device's runtime was loaded"
    registered = privateuse1.registered()
    assert registered is not None
    assert registered.backend == subject.backend
    assert_equal(kept + 1, torch.tensor([1, 2, 3]), on=device)


@pytest.mark.fresh
@pytest.mark.only("privateuse1")
@pytest.mark.parametrize("named", [False, True])
def test_a_failure_is_told_and_harms_nobody(subject: Subject, named: bool) -> None:
    """A runtime that fails is told with the slot's state, each time, and the device still works."""

    class Failing(_Other):
        @staticmethod
        def backend(params: Any) -> DeviceBackend:
            return subject.backend

        @staticmethod
        def load_runtime(params: Any) -> ModuleType:
            if named:
                torch.utils.rename_privateuse1_backend(subject.backend.name)
            raise OSError("no such library")

    messages = []
    for _ in range(2):
        with pytest.raises(PluginContractError, match="no such library") as raised:
            Failing.register(Failing.Params())
        messages.append(str(raised.value))
        assert not privateuse1.has_backend()
    assert messages[0] == messages[1]
    assert ("until this process ends" if named else "still free") in messages[0], messages[0]
    device = subject.implementation.device(subject.params, 0)
    assert_equal(torch.ones(2, device=device), torch.ones(2), on=device)


@pytest.mark.fresh
@pytest.mark.offline
def test_the_collective_library_is_the_declared_one(subject: Subject) -> None:
    """torch.distributed knows the declared library for the device, or none if none is declared."""
    backend = subject.implementation.register(subject.params)
    known = dist.Backend.default_device_backend_map.get(backend.name)
    assert known == backend.collective_backend, f"torch.distributed has {known} for it"


_OTHER = DeviceBackend("other_device", "bfloat16")


class _Other(PrivateUse1Device):
    """A device that cannot be loaded."""

    @staticmethod
    def backend(params: Any) -> DeviceBackend:
        return _OTHER

    @staticmethod
    def unavailable(params: Any) -> str | None:
        return None

    @staticmethod
    def load_runtime(params: Any) -> ModuleType:
        raise NotImplementedError

    @staticmethod
    def initializations() -> int:
        return 0


def _noting(called: list[object]) -> Any:
    def load_runtime(params: Any) -> ModuleType:
        called.append(params)
        return ModuleType("nothing")

    return staticmethod(load_runtime)

"""What registering a device checks, each in a process of its own, since a process has one slot.

The devices here have torch's Python hooks in place of a C++ runtime.
"""

import pytest

RUNTIME = """
import threading
import types

import torch

from core_plugin.privateuse1 import requirements
from core_plugin.types import PrivateUse1Device
from core_plugin.privateuse1 import DeviceBackend, DeviceCapabilities

loads = []


def load(hooks=True, without=()):
    loads.append(threading.get_ident())
    if hooks:
        class Hooks(torch._C._acc.PrivateUse1Hooks):
            def is_available(self): return True
            def is_built(self): return True
            def has_primary_context(self, index): return True

        class Guard(torch._C._acc.DeviceGuard):
            def type_(self): return torch._C._autograd.DeviceType.PrivateUse1

        torch._C._acc.register_python_privateuseone_hook(Hooks())
        torch._C._acc.register_python_privateuseone_device_guard(Guard())
    module = types.ModuleType("runtime")
    for name in set(requirements.FUNCTIONS) - set(without):
        setattr(module, name, lambda *a: 0)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    return module


def kernels(without=()):
    library = torch.library.Library("aten", "IMPL")
    for names in requirements.KERNELS.values():
        for name in names:
            if name not in without:
                library.impl(name.removeprefix("aten::"), lambda *a, **k: None, "PrivateUse1")
    return library


class Buzz(PrivateUse1Device):
    @staticmethod
    def backend(params): return DeviceBackend("buzz", "bfloat16")
    @staticmethod
    def unavailable(params): return None
    @staticmethod
    def initializations(): return 0
    @staticmethod
    def load_runtime(params):
        Buzz.library = kernels()
        return load()


class Other(Buzz):
    @staticmethod
    def backend(params): return DeviceBackend("other", "bfloat16")


params = Buzz.Params()
"""


@pytest.fixture
def registering(environment):
    """Runs code after RUNTIME, which two distributions own, and returns what it prints."""
    site = environment.site()
    site.add("buzz-works", device="buzz = buzz:Buzz", modules={"buzz.py": RUNTIME})
    site.add("other-works", version="2.0", device="other = buzz:Other")

    def run(code: str) -> str:
        start = (
            "from core_plugin import *\nfrom core_plugin.privateuse1 import *\nfrom buzz import *\n"
        )
        return environment.output(start + code)

    return run


def failing(body: str) -> str:
    """Code that registers a device with other methods twice, and prints what is raised."""
    return f"""
class Broken(Buzz):
{body}
for _ in range(2):
    try:
        Broken.register(params)
    except CorePluginError as error:
        print(type(error).__name__, error)
assert not has_backend() and registered() is None
assert len(loads) <= 1, loads
"""


def test_a_device_is_registered_once_by_eight_threads(registering):
    registering("""
from concurrent.futures import ThreadPoolExecutor
assert not has_backend()
barrier = threading.Barrier(8)
def register(_):
    barrier.wait()
    return Buzz.register(params)
with ThreadPoolExecutor(8) as pool:
    backends = list(pool.map(register, range(8)))
assert len(loads) == 1
assert has_backend() and all(b is registered().backend for b in backends)
assert str(torch.device("buzz", 1)) == "buzz:1"
""")


def test_every_thread_gets_the_default_autocast_dtype(registering):
    registering("""
from core_plugin.devices import autocast
Buzz.register(params)
found = []
def look():
    with autocast("buzz"):
        found.append(torch.get_autocast_dtype("buzz"))
    Buzz.register(params)
    found.append(torch.get_autocast_dtype("buzz"))
thread = threading.Thread(target=look)
thread.start()
thread.join()
assert found == [torch.bfloat16, torch.bfloat16], found
""")


def test_a_second_device_is_refused_and_the_first_stays(registering):
    told = registering("""
Buzz.register(params)
for _ in range(2):
    try:
        Other.register(params)
    except PluginConflictError as error:
        print(error)
assert registered().backend.name == "buzz"
assert Buzz.register(params) is registered().backend
""")
    first, second = told.splitlines()
    assert first == second
    assert "buzz-works 1.0" in first
    assert "other-works 2.0" in first
    assert "a process of its own" in first


def test_other_parameters_are_refused_and_a_device_is_found_by_its_name(registering):
    told = registering("""
import dataclasses
from core_plugin.devices import parse_device
from core_plugin.builtin.device import Auto

@dataclasses.dataclass(frozen=True)
class Params:
    size: int
Buzz.Params = Params
Buzz.register(Params(1))
assert Buzz.register(Params(1)) is registered().backend
assert str(parse_device("buzz")) == "buzz" == str(parse_device("privateuse1"))
try:
    Buzz.register(Params(2))
except PluginConflictError as error:
    print(error)
with Auto.workarounds():
    assert torch.__future__.get_swap_module_params_on_conversion()
""")
    assert "is registered with Params(size=1); with Params(size=2) it needs a process" in told


def test_a_slot_that_is_taken_by_others(registering):
    told = registering("""
torch.utils.rename_privateuse1_backend("npu")
try:
    Buzz.register(params)
except PluginConflictError as error:
    print(error)
assert loads == []
""")
    assert "it is 'npu', of code that core-plugin does not know" in told
    assert "buzz-works 1.0" in told


def test_a_runtime_that_cannot_be_loaded_leaves_the_slot_free(registering):
    told = registering(
        failing("""
    @staticmethod
    def load_runtime(params):
        loads.append(1)
        raise OSError("libbuzz.so: cannot open shared object file") from KeyError("no such symbol")
""")
        + "Buzz.register(params)\nassert registered().backend.name == 'buzz'\n"
    )
    first, second = told.splitlines()
    assert first == second
    assert (
        "OSError: libbuzz.so: cannot open shared object file ('no such symbol') (<string>:" in first
    )
    assert "slot for such a device is still free" in first


def test_a_failure_is_raised_again_with_its_cause(registering):
    registering("""
class Broken(Buzz):
    @staticmethod
    def load_runtime(params):
        raise OSError("no library")
errors = []
for _ in range(2):
    try:
        Broken.register(params)
    except PluginContractError as error:
        errors.append(error)
assert errors[0].args == errors[1].args
assert errors[0].__cause__ is errors[1].__cause__
assert isinstance(errors[0].__cause__, OSError)
""")


def test_missing_functions_are_named(registering):
    told = registering(
        failing("""
    @staticmethod
    def load_runtime(params): return load(without=("set_device", "device_count"))
""")
    )
    assert "the runtime's module lacks device_count, set_device" in told
    assert "still free" in told


def test_functions_of_a_capability_are_asked_for_with_it(registering):
    told = registering(
        failing("""
    @staticmethod
    def backend(params):
        return DeviceBackend("buzz", "bfloat16", None, DeviceCapabilities(streams=True))
""")
    )
    assert "lacks Stream (for streams), current_stream (for streams), stream (for st" in told


def test_missing_hooks_are_named_and_the_slot_is_used_up(registering):
    told = registering(
        failing("""
    @staticmethod
    def load_runtime(params): return load(hooks=False)
""")
        + """
try:
    Other.register(params)
except PluginConflictError as error:
    print(error)
"""
    )
    first, second, conflict = told.splitlines()
    assert first == second
    assert "the runtime registers no PrivateUse1HooksInterface" in first
    assert "is 'buzz' until this process ends" in first
    assert "Broken" in conflict
    assert "other-works 2.0" in conflict


def test_a_default_dtype_without_autocast_is_named(registering):
    told = registering(
        failing("""
    @staticmethod
    def backend(params): return DeviceBackend("buzz", "float16")
""")
    )
    assert "autocast dtype torch.float16 is not in get_amp_supported_dtype()" in told


def test_a_declared_collective_library_must_be_there_and_for_the_device(registering):
    told = registering(
        failing("""
    @staticmethod
    def backend(params): return DeviceBackend("buzz", "bfloat16", "buzzccl")
""")
    )
    assert "the collective library 'buzzccl' is declared, but not registered with c10d" in told
    told = registering(
        failing("""
    @staticmethod
    def backend(params): return DeviceBackend("buzz", "bfloat16", "gloo")
""")
    )
    assert "'gloo' is registered, but not for 'buzz'" in told


def test_missing_kernels_are_named_with_their_purpose(registering):
    told = registering(
        failing("""
    @staticmethod
    def load_runtime(params):
        Buzz.library = kernels(without=("aten::view", "aten::_local_scalar_dense"))
        return load()
""")
    )
    assert "no kernel for aten::view (views), aten::_local_scalar_dense (reading a scalar)" in told


def test_workarounds_are_active_only_while_they_are_asked_for(registering):
    registering("""
swaps = torch.__future__.get_swap_module_params_on_conversion
Buzz.register(params)
assert not swaps()
try:
    with Buzz.workarounds():
        assert swaps()
        raise KeyError
except KeyError:
    pass
assert not swaps()
""")

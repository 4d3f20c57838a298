"""What a device may be called, and how users write devices."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_plugin import PluginContractError
from core_plugin.privateuse1 import DeviceBackend
from core_plugin.privateuse1.backend import BUILT_IN_DEVICES

pytestmark = pytest.mark.torchfree

letters = st.text(string.ascii_lowercase + "_", min_size=1).filter(lambda t: t[0] != "_")


@given(letters)
def test_lowercase_letters_and_underscores_are_a_name(name):
    assert DeviceBackend(name, "bfloat16").name == name


@given(st.text())
def test_nothing_else_is_a_name(name):
    good = bool(name) and name[0] in string.ascii_lowercase
    if good and set(name) <= set(string.ascii_lowercase + "_"):
        return
    with pytest.raises(PluginContractError, match="cannot be called"):
        DeviceBackend(name, "bfloat16")


@pytest.mark.parametrize("name", ["dev1", "1dev", "cuda2", "privateuse1"])
def test_digits_are_refused_with_their_reason(name):
    with pytest.raises(PluginContractError, match=r"torch\.device reads no digits"):
        DeviceBackend(name, "bfloat16")


def test_the_autocast_dtype_is_asked_for_and_one_of_two():
    with pytest.raises(TypeError, match="default_autocast_dtype"):
        DeviceBackend("acme")
    for dtype in ("float32", "int8", ""):
        with pytest.raises(PluginContractError, match="must be 'float16' or 'bfloat16'"):
            DeviceBackend("acme", dtype)


def test_a_built_in_name_is_refused_before_torch_is_touched(environment):
    code = """
import sys
from core_plugin import PluginContractError
from core_plugin.privateuse1 import DeviceBackend, has_backend, register
class provider: pass
for name in ("cpu", "cuda", "meta", "privateuseone"):
    try:
        provider.backend = lambda params: DeviceBackend(name, "float16")
        register(provider, None)
    except PluginContractError as error:
        assert "torch has one" in str(error), error
    else:
        raise AssertionError(name)
assert not has_backend()
assert "torch" not in sys.modules
"""
    environment.output(code)


def test_importing_the_types_of_devices_imports_no_torch(environment):
    environment.output(
        "import sys, core_plugin.devices, core_plugin.builtin.device;"
        "assert 'torch' not in sys.modules"
    )


def test_every_built_in_name_is_a_possible_one_otherwise():
    assert all(set(name) <= set(string.ascii_lowercase) for name in BUILT_IN_DEVICES)

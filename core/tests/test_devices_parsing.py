"""Devices as users write them, and autocast on them."""

import pytest
import torch

from core_plugin import (
    ConfigError,
    DeviceIndexError,
    PluginLoadError,
    PluginNotFoundError,
    PluginUnavailableError,
)
from core_plugin.builtin.device import CPU, CUDA, Auto
from core_plugin.devices import autocast, parse_device
from core_plugin.privateuse1.backend import BUILT_IN_DEVICES


def test_names_and_indices():
    assert parse_device("cpu") == torch.device("cpu")
    assert parse_device("cpu:0") == torch.device("cpu", 0)
    assert parse_device("auto").type == Auto.backend(Auto.Params()).name


@pytest.mark.parametrize(
    "text", ["", ":0", "cpu:", "cpu:-1", "cpu:01", "CPU", "cpu 0", "cpu:0:0", "cuda0", "cpu:a", "é"]
)
def test_malformed(text):
    with pytest.raises(ConfigError, match="is no device: write a name"):
        parse_device(text)


def test_unknown():
    with pytest.raises(PluginNotFoundError, match=r"'cpo'.*did you mean cpu\?.*installed: auto"):
        parse_device("cpo")


def test_the_slot_without_a_device():
    for text in ("privateuse1", "privateuseone:0"):
        with pytest.raises(PluginNotFoundError, match="no device is registered in torch's slot"):
            parse_device(text)


def test_out_of_range():
    with pytest.raises(DeviceIndexError, match=r"there is no cpu:1: cpu has the indices 0 to 0"):
        parse_device("cpu:1")


def test_installed_but_cannot_run_here():
    reason = CUDA.unavailable(CUDA.Params())
    assert reason, "these tests are for a machine without a GPU"
    with pytest.raises(PluginUnavailableError, match="'cuda' is installed, but cannot run here: "):
        parse_device("cuda:0")


def test_a_broken_package_is_told_with_its_cause(environment):
    environment.site().add("acme", device="acme = acme:Device", modules={"acme.py": "1 / 0"})
    with pytest.raises(PluginLoadError, match="acme") as caught:
        parse_device("acme")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_the_built_in_names_are_those_of_torch():
    with pytest.raises(RuntimeError) as caught:
        torch.device("nosuch")
    listed = str(caught.value).removeprefix("Expected one of ").partition(" device type")[0]
    assert set(listed.split(", ")) == BUILT_IN_DEVICES


def test_autocast_takes_the_default_or_what_is_asked_for():
    ones = torch.ones(2, 2)
    with autocast("cpu"):
        assert (ones @ ones).dtype == getattr(
            torch, CPU.backend(CPU.Params()).default_autocast_dtype
        )
    with autocast("cpu", torch.float16):
        assert (ones @ ones).dtype == torch.float16


def test_autocast_never_computes_in_another_dtype():
    with pytest.raises(PluginUnavailableError, match=r"cpu has no autocast in torch\.float32"):
        autocast("cpu", torch.float32)

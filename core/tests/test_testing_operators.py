"""The comparison of torch's operators: what it finds, what it leaves out, what it survives."""

from __future__ import annotations

from collections import Counter

import pytest

from core_plugin.builtin.device import CPU
from core_plugin.errors import CorePluginError
from core_plugin.testing.device import operators, operators_comparison
from core_plugin.testing.device.operators_known import KNOWN, NEEDS, UNDETERMINED, KnownDifference
from core_plugin.testing.device.subject import Subject
from core_plugin.types import DevicePlugin

FAULTY = """
import os
import signal
import time
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core_plugin.errors import PluginUnavailableError
from core_plugin.privateuse1 import DeviceBackend, DeviceCapabilities
from core_plugin.types import BaseDevice


def refuse():
    raise RuntimeError("there is no kernel")


FAULTS = {
    "sin": lambda result: result + 0.01,
    "sign": lambda result: result.to(torch.float64),
    "neg": lambda result: result.to("meta"),
    "sigmoid_backward": lambda result: 2 * result,
    "cosh": lambda result: refuse(),
    "cos": lambda result: os.kill(os.getpid(), signal.SIGSEGV),
    "acos": lambda result: os._exit(3),
    "tan": lambda result: time.sleep(600),
}


class Faults(TorchDispatchMode):
    # Every second call is the device's: the CPU's results are computed before.
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        self.calls[name] += 1
        return FAULTS[name](result) if name in FAULTS and self.calls[name] % 2 == 0 else result


class Faulty(BaseDevice):
    @staticmethod
    def backend(params):
        return DeviceBackend("cpu", "bfloat16", None, DeviceCapabilities(float64=True))
    @staticmethod
    def unavailable(params): return None
    @staticmethod
    def device(params, local_rank): return torch.device("cpu")
    @staticmethod
    def workarounds(): return Faults()


class Missing(Faulty):
    @staticmethod
    def device(params, local_rank): raise PluginUnavailableError("it is not plugged in")
"""


@pytest.fixture
def subject(environment):
    """Makes a device that computes on the CPU, with faults."""
    environment.site().add(
        "faulty-device",
        device="faulty = faulty:Faulty\nmissing = faulty:Missing",
        modules={"faulty.py": FAULTY},
    )
    return lambda name: Subject(name, DevicePlugin(name).params_type()())


def test_the_cpu_is_equal_to_itself():
    results = operators.compare_operators(Subject("cpu", CPU.Params()))
    found = Counter((result.kind, result.outcome) for result in results)
    assert found["forward", "equal"] >= 550
    assert found["backward", "equal"] >= 350
    assert {outcome for _, outcome in found} == {"equal", "left out"}, [
        result for result in results if result.outcome not in ("equal", "left out")
    ]
    assert len({(result.operator, result.kind) for result in results}) == len(results)
    assert all(result.message for result in results if result.outcome == "left out")
    listed = {name for entries in KNOWN.values() for name, _ in entries} | {*UNDETERMINED, *NEEDS}
    assert listed <= {result.operator for result in results}, "torch has no such operators"


def test_faults_are_found_each_and_the_rest_goes_on(subject, monkeypatch):
    monkeypatch.setattr(operators, "OPERATOR_SECONDS", 5.0)
    names = ["cos", "tan", "acos", "sin", "sign", "neg", "cosh", "sinh", "fft.fft", "rand_like"]
    results = operators.compare_operators(subject("faulty"), ["forward"], names)
    assert [result.operator for result in results] == names
    found = {result.operator: (result.outcome, result.message) for result in results}
    expected = {
        "cos": ("crashed", "signal SIGSEGV"),
        "tan": ("crashed", "no answer within 5 s"),
        "acos": ("crashed", "exit code 3"),
        "sin": ("different", "Tensor-likes are not close"),
        "sign": ("different", "do not match: torch.float64 != torch.float32"),
        "neg": ("different", "a result is on meta"),
        "cosh": ("different", "RuntimeError: there is no kernel"),
        "sinh": ("equal", ""),
        "fft.fft": ("left out", "the device does not declare complex_numbers"),
        "rand_like": ("left out", "it draws random numbers"),
    }
    for operator, (outcome, message) in expected.items():
        assert found[operator][0] == outcome, (operator, found[operator])
        assert message in found[operator][1]
    assert "SampleInput" in found["sin"][1]


def test_a_wrong_gradient_is_found(subject):
    results = operators.compare_operators(subject("faulty"), names=["sigmoid", "argmax"])
    assert [(result.operator, result.kind, result.outcome) for result in results] == [
        ("sigmoid", "forward", "equal"),
        ("sigmoid", "backward", "different"),
        ("argmax", "forward", "equal"),
        ("argmax", "backward", "left out"),
    ]


def test_a_device_that_always_crashes_is_given_up(subject, monkeypatch):
    monkeypatch.setattr(operators, "PROCESSES", 1)
    monkeypatch.setattr(operators, "CRASHES", 1)
    first, second = operators.compare_operators(subject("faulty"), ["forward"], ["cos", "sinh"])
    assert (first.outcome, second.outcome) == ("crashed", "crashed")
    assert "SIGSEGV" in first.message
    assert second.message == "not compared: 1 crashed before it"


def test_a_device_that_cannot_be_used_is_told_at_once(subject):
    with pytest.raises(CorePluginError, match="it is not plugged in"):
        operators.compare_operators(subject("missing"))


@pytest.mark.parametrize(
    ("known", "difference", "outcome"),
    [
        (None, None, "equal"),
        (None, "it is off", "different"),
        (KnownDifference("torch's own"), "it is off", "known"),
        (KnownDifference("torch's own"), None, "unexpectedly equal"),
        (KnownDifference("torch's own", always=False), None, "equal"),
    ],
)
def test_a_known_difference_that_is_gone_is_told(known, difference, outcome):
    found, message = operators_comparison._judged(known, difference)
    assert found == outcome
    assert ("torch's own" in message) == (outcome in ("known", "unexpectedly equal"))

"""What ``torch.profiler`` sees of the device."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

pytestmark = pytest.mark.level(1)


def test_a_profile_of_the_host_names_the_operators(device: torch.device, directory: Path) -> None:
    """The CPU's activity records the operators that were called on the device."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        torch.ones(4, 4, device=device).matmul(torch.ones(4, 4, device=device)).add(1)
    names = {event.key for event in profiled.key_averages()}
    assert {"aten::matmul", "aten::add"} <= names, f"it recorded {sorted(names)}"
    profiled.export_chrome_trace(str(directory / "trace.json"))
    assert (directory / "trace.json").stat().st_size > 0


@pytest.mark.requires("profiler")
def test_the_device_has_an_activity_of_its_own(device: torch.device) -> None:
    """``ProfilerActivity`` has the device's name, and tells how long the device was at work."""
    activity = getattr(ProfilerActivity, device.type.upper())
    if activity not in supported_activities():
        raise RuntimeError(f"torch supports no activity {activity}")
    began = time.perf_counter()
    with profile(activities={ProfilerActivity.CPU, activity}) as profiled:
        torch.ones(64, 64, device=device).matmul(torch.ones(64, 64, device=device))
        torch.get_device_module(device).synchronize()
    passed = 1e6 * (time.perf_counter() - began)
    longest = max(_microseconds(profiled, device), default=0)
    if not longest:
        raise RuntimeError(f"{activity} tells of nothing that took time on the device")
    assert longest <= passed, f"one of {passed:.0f} microseconds took {longest:.0f}"
    assert profiled.key_averages().table(), "the profile has no table"


def _microseconds(profiled: profile, device: torch.device) -> list[float]:
    """How long each thing took that the device did."""
    if device.type == "cpu":
        return [event.cpu_time_total for event in profiled.events()]
    own = [event for event in profiled.events() if event.device_type != DeviceType.CPU]
    return [event.device_time_total for event in own]

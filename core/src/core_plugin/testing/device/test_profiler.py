"""What ``torch.profiler`` sees of the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
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
    """``ProfilerActivity`` has the device's name, and a profile with it is recorded."""
    activity = getattr(ProfilerActivity, device.type.upper())
    if activity not in supported_activities():
        raise RuntimeError(f"torch supports no activity {activity}")
    with profile(activities={ProfilerActivity.CPU, activity}) as profiled:
        torch.ones(4, 4, device=device).matmul(torch.ones(4, 4, device=device))
        torch.get_device_module(device).synchronize()
    averages = profiled.key_averages()
    assert "aten::matmul" in {event.key for event in averages}
    assert averages.table(), "the profile has no table"

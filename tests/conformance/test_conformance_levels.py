"""The levels that the devices of this repository reach."""

from __future__ import annotations

import dataclasses
import json

from core_plugin.privateuse1 import DeviceCapabilities

CAPABILITIES = [field.name for field in dataclasses.fields(DeviceCapabilities)]


def test_the_fake_device_passes_every_case(report):
    found, _ = report("device:fake")
    assert found["level"] == 3
    assert found["results"] == {"pass": len(found["cases"])}
    assert len({case["name"].partition("[")[0] for case in found["cases"]}) >= 100
    assert {case["capability"] for case in found["cases"]} == {None, *CAPABILITIES}


def test_the_cpu_passes_every_case_that_is_for_it(report):
    found, _ = report("device:cpu")
    assert found["level"] == 3
    assert {c["capability"] for c in found["cases"] if c["result"] == "undeclared, but works"} <= {
        "average_in_collectives",
        "pinned_memory",
    }


def test_a_device_without_any_capability_refuses_cleanly(report):
    """torch's own parts of level 3 need some of them."""
    without = f"without={json.dumps(CAPABILITIES)}"
    found, _ = report("device:fake", without, "--level=2")
    assert found["level"] == 2
    assert set(found["results"]) == {"pass", "not declared"}
    refused = {c["capability"] for c in found["cases"] if c["result"] == "not declared"}
    assert refused == {*CAPABILITIES} - {"cpu_offload"}

"""The levels that the devices of this repository reach."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from core_plugin.privateuse1 import DeviceCapabilities

CAPABILITIES = [field.name for field in dataclasses.fields(DeviceCapabilities)]


def report(directory: Path, *arguments: str) -> dict:
    """The report of a run that passes."""
    file = directory / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "core_plugin", "test", *arguments, "--json", str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"level reached: {json.loads(file.read_text())['level']}" in done.stdout
    return json.loads(file.read_text())


def test_the_fake_device_passes_every_case(tmp_path):
    found = report(tmp_path, "device:fake")
    assert found["level"] == 3
    assert found["results"] == {"pass": len(found["cases"])}
    assert len({case["name"].partition("[")[0] for case in found["cases"]}) >= 100
    assert {case["capability"] for case in found["cases"]} == {None, *CAPABILITIES}


def test_the_cpu_passes_every_case_that_is_for_it(tmp_path):
    found = report(tmp_path, "device:cpu")
    assert found["level"] == 3
    assert {c["capability"] for c in found["cases"] if c["result"] == "undeclared, but works"} <= {
        "average_in_collectives",
        "pinned_memory",
    }


def test_a_device_without_any_capability_refuses_cleanly(tmp_path):
    """torch's own parts of level 3 need some of them."""
    without = f"without={json.dumps(CAPABILITIES)}"
    found = report(tmp_path, "device:fake", without, "--level=2")
    assert found["level"] == 2
    assert set(found["results"]) == {"pass", "not declared"}
    refused = {c["capability"] for c in found["cases"] if c["result"] == "not declared"}
    assert refused == {*CAPABILITIES} - {"cpu_offload"}

"""The strategies of this repository, and one of somebody else's, pass the suite for their type."""

from __future__ import annotations

import os
from pathlib import Path

TIDEWATER = Path(__file__).parents[1] / "tidewater" / "src"


def unfit(found: dict, result: str) -> set[str | None]:
    """The capabilities of the cases that ended so."""
    return {case["capability"] for case in found["cases"] if case["result"] == result}


def test_none(report):
    """Its cases of one rank pass, on every level; those of several are not for it."""
    found, _ = report("distributed:none")
    assert found["level"] == 3
    assert set(found["results"]) == {"pass", "not for it", "not declared"}
    passed = " ".join(case["name"] for case in found["cases"] if case["result"] == "pass")
    assert "[1_rank" in passed
    assert not any(f"{ranks}_ranks" in passed for ranks in (2, 3, 4))


def test_ddp(report):
    found, _ = report("distributed:ddp")
    assert found["level"] == 3
    assert set(found["results"]) == {"pass", "not declared"}
    assert unfit(found, "not declared") == {"sharded_state", "mixed_precision"}


def test_fsdp2(report):
    found, _ = report("distributed:fsdp2")
    assert found["level"] == 3
    assert found["results"] == {"pass": len(found["cases"])}


def test_fsdp2_with_replicas(report):
    """Two replicas are for four ranks."""
    found, _ = report("distributed:fsdp2", "replicas=2", "-k", "4_ranks or any_number")
    passed = [case["name"] for case in found["cases"] if case["result"] == "pass"]
    assert set(found["results"]) == {"pass", "not run"}
    assert len(passed) >= 4


def test_somebody_elses(report, tmp_path, monkeypatch):
    """One that sums gradients, and gives the loop everything else as the contract does."""
    entry_points = tmp_path / "tidewater-1.0.dist-info" / "entry_points.txt"
    entry_points.parent.mkdir()
    entry_points.write_text("[core_plugin.distributed]\nbreakwater = tidewater.strategy:Breakwater")
    (entry_points.parent / "METADATA").write_text("Name: tidewater\nVersion: 1.0\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TIDEWATER), str(tmp_path)]))
    found, _ = report("distributed:breakwater", "--level=2")
    assert found["level"] == 2
    assert set(found["results"]) == {"pass", "not declared"}

"""Checkpoints on the disk: complete or absent, and never loaded when they are damaged."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from core_plugin.errors import CheckpointError
from core_plugin.training.checkpoint import Checkpoints, verify
from core_plugin.training.world import join


@pytest.fixture
def checkpoints(tmp_path):
    with join(None) as world:
        world.start("gloo")
        yield Checkpoints(tmp_path / "checkpoints", world, keep=2)
    assert not dist.is_initialized()


def write(directory):
    (directory / "state").mkdir()
    (directory / "state" / "tensors").write_bytes(bytes(range(256)))
    (directory / "run.json").write_text("{}")


def test_a_saved_checkpoint_verifies(checkpoints):
    path = checkpoints.save(3, write)
    assert path.name == "step-00000003"
    assert verify(path) == []
    assert checkpoints.newest() == path
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert sorted(files) == ["run.json", "state/tensors"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "state/tensors").write_bytes(bytes(256)), "another content"),
        (lambda p: (p / "state/tensors").write_bytes(b"short"), "has 5 bytes, not 256"),
        (lambda p: (p / "run.json").unlink(), "run.json is missing"),
        (lambda p: (p / "state/more").write_text(""), "state/more was added"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda p: (p / "manifest.json").unlink(), "manifest.json cannot be read"),
        (lambda p: (p / "manifest.json").write_text('{"files": {}, "format": 2}'), "format 2"),
    ],
)
def test_damage_is_found_and_the_one_before_it_is_the_newest(checkpoints, damage, message):
    before, damaged = checkpoints.save(1, write), checkpoints.save(2, write)
    damage(damaged)
    assert [f for f in verify(damaged) if message in f]
    with pytest.warns(UserWarning, match="is broken, and set aside as broken-step-00000002"):
        assert checkpoints.newest() == before
    later = checkpoints.save(3, write)
    assert list(checkpoints.steps().values()) == [before, later]


def test_a_save_that_fails_leaves_nothing_and_the_others_as_they_were(checkpoints, tmp_path):
    kept = checkpoints.save(1, write)

    def fail(directory):
        write(directory)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step-00000002 failed on rank 0.*No space left"):
        checkpoints.save(2, fail)
    assert list((tmp_path / "checkpoints").iterdir()) == [kept]
    assert verify(kept) == []


def test_what_an_interrupted_save_left_is_no_checkpoint(checkpoints, tmp_path):
    (tmp_path / "checkpoints" / ".partial-step-00000009").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".removed-step-00000001").mkdir()
    assert checkpoints.newest() is None
    assert checkpoints.steps() == {}
    saved = checkpoints.save(10, write)
    assert list((tmp_path / "checkpoints").iterdir()) == [saved]


def test_the_newest_are_kept(checkpoints, tmp_path):
    for step in (1, 2, 3, 10):
        checkpoints.save(step, write)
    assert list(checkpoints.steps()) == [3, 10]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_what_was_just_saved_is_kept_whatever_its_step(checkpoints):
    for step in (5, 6, 4):
        checkpoints.save(step, write)
    assert list(checkpoints.steps()) == [4, 5, 6]


def test_saving_a_step_again_replaces_it(checkpoints):
    checkpoints.save(1, write)
    assert verify(checkpoints.save(1, write)) == []
    assert list(checkpoints.steps()) == [1]

"""Checkpoints on the disk: complete or absent, and never loaded when they are damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from core_plugin.errors import CheckpointError
from core_plugin.testing.children import run_script
from core_plugin.training import saved
from core_plugin.training.checkpoint import Checkpoints, verify
from core_plugin.training.world import join

STAGING = Path(__file__).with_name("staging_processes.py")


@pytest.fixture
def world():
    with join(None) as world:
        world.start("gloo")
        yield world
    assert not dist.is_initialized()


@pytest.fixture
def checkpoints(tmp_path, world):
    return Checkpoints(tmp_path / "checkpoints", world, keep=2)


def write(directory, world=None):
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


def damage_the_manifest(checkpoint, key):
    manifest = checkpoint / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"{key}"', f'"{key[:-1]}~"'))


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
        *(
            (lambda p, key=key: damage_the_manifest(p, key), "manifest.json cannot be read")
            for key in ("format", "files", "size", "sha256")
        ),
        (lambda p: (p / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
        (
            lambda p: (p / "manifest.json").write_text('{"files": {"a": 1}, "format": 1}'),
            "manifest.json cannot be read",
        ),
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


def test_a_file_that_cannot_be_read_is_damage(tmp_path, world, monkeypatch):
    checkpoints = Checkpoints(tmp_path, world, keep=2)
    before, damaged = checkpoints.save(1, write), checkpoints.save(2, write)
    sha256 = saved.sha256

    def read(file):
        if file == damaged / "state" / "tensors":
            raise OSError(5, "Input/output error")
        return sha256(file)

    monkeypatch.setattr(saved, "sha256", read)
    assert verify(damaged) == ["state/tensors cannot be read ([Errno 5] Input/output error)"]
    with pytest.warns(UserWarning, match="step-00000002 is broken.*Input/output error"):
        assert Checkpoints(tmp_path, world, keep=2).newest() == before


def test_what_cannot_be_removed_is_warned_about_and_the_new_one_is_complete(
    checkpoints, monkeypatch
):
    def remove(path):
        raise PermissionError(13, "Permission denied", str(path))

    for step in (1, 2):
        checkpoints.save(step, write)
    monkeypatch.setattr(saved, "remove", remove)
    with pytest.warns(UserWarning, match="step-00000003 is complete, but removing old.*denied"):
        new = checkpoints.save(3, write)
    assert verify(new) == []
    assert list(checkpoints.steps()) == [1, 2, 3]


def test_a_save_that_fails_leaves_nothing_and_the_others_as_they_were(checkpoints, tmp_path):
    kept = checkpoints.save(1, write)

    def fail(directory, world):
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


# The best


def with_loss(loss):
    def write_with_loss(directory, world):
        write(directory)
        (directory / "run.json").write_text(json.dumps({"loss": loss}))

    return write_with_loss


def save_all(checkpoints, losses):
    for step, loss in enumerate(losses, 1):
        checkpoints.save(step, with_loss(loss))


def flip(checkpoint):
    file = checkpoint / "state" / "tensors"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("losses", "left"),
    [
        ([3, 1, 2, 4, 5], [2, 4, 5]),
        ([3, 5, 4, 2, 1], [4, 5]),
        ([1, 3, 1, 4, 5], [3, 4, 5]),
        ([None, 2, None, None, None], [2, 4, 5]),
        ([None] * 5, [4, 5]),
        ([2, float("nan"), 3, 4, 5], [1, 4, 5]),
        ([2, "low", 3, -float("inf"), 5], [1, 4, 5]),
    ],
)
def test_the_one_with_the_lowest_loss_is_kept_too(checkpoints, losses, left):
    save_all(checkpoints, losses)
    assert list(checkpoints.steps()) == left


def test_the_best_is_not_kept_if_it_is_not_wanted(tmp_path, world):
    checkpoints = Checkpoints(tmp_path, world, keep=1, keep_best=False)
    save_all(checkpoints, [1, 2, 3])
    assert list(checkpoints.steps()) == [3]


def test_another_process_knows_the_best(tmp_path, world):
    save_all(Checkpoints(tmp_path, world, keep=1), [2, 1, 3])
    later = Checkpoints(tmp_path, world, keep=1)
    for step, loss in ((4, 1.5), (5, 0.5), (6, 2)):
        later.save(step, with_loss(loss))
    assert list(later.steps()) == [5, 6]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_broken_one_is_not_the_best(tmp_path, world, is_new):
    """Whether this process wrote it, and so knows its hashes, or another one."""
    checkpoints = Checkpoints(tmp_path, world, keep=1)
    save_all(checkpoints, [1, 2])
    if is_new:
        checkpoints = Checkpoints(tmp_path, world, keep=1)
    flip(checkpoints.steps()[1])
    with pytest.warns(UserWarning, match="step-00000001 is broken, and set aside as broken-step-"):
        checkpoints.save(3, with_loss(3))
    assert list(checkpoints.steps()) == [2, 3]
    checkpoints.save(4, with_loss(4))
    assert list(checkpoints.steps()) == [2, 4]


def test_a_broken_one_is_not_the_newest_that_is_kept(checkpoints):
    save_all(checkpoints, [1, 2, 3])
    flip(checkpoints.steps()[3])
    with pytest.warns(UserWarning, match="step-00000003 is broken"):
        checkpoints.save(4, with_loss(4))
    assert list(checkpoints.steps()) == [1, 2, 4]


def test_what_has_not_changed_is_not_read_again(checkpoints, monkeypatch):
    save_all(checkpoints, [1, 2, 3])
    read = []
    sha256 = saved.sha256
    monkeypatch.setattr(saved, "sha256", lambda file: read.append(file) or sha256(file))
    path = checkpoints.save(4, with_loss(4))
    assert {file.parent.parent.name for file in read if file.name == "tensors"} == {
        f".partial-{path.name}"
    }


def test_sizes_are_compared_without_reading_the_content(checkpoints):
    path = checkpoints.save(1, write)
    flip(path)
    assert verify(path, content=False) == []
    assert verify(path) == ["state/tensors has another content than was written (SHA-256)"]
    (path / "state" / "tensors").write_bytes(b"short")
    assert verify(path, content=False) == ["state/tensors has 5 bytes, not 256"]


# In the background


def test_one_to_four_ranks_write_copies_while_they_train_on(tmp_path):
    run_script(STAGING, tmp_path, seconds=240)

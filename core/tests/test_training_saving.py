"""A save in the background while the run fails: how long it is waited for."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from core_plugin.training import saving
from core_plugin.training.checkpoint import Checkpoints
from core_plugin.training.world import join

LOST = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer")
OUT_OF_MEMORY = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.fixture
def world():
    with join(None) as world:
        world.start("gloo")
        yield world


@pytest.fixture
def released():
    """Lets the save that is under way go on; a test that forgets does not hang."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def checkpoints(tmp_path, world):
    return Checkpoints(tmp_path / "checkpoints", world.separate(), keep=1)


@pytest.fixture
def saver(world, checkpoints, released, monkeypatch):
    """One whose save, under way, waits to be released."""

    def write(directory, world):
        released.wait(10)
        (directory / "tensors").write_bytes(b"saved")

    config = SimpleNamespace(checkpoint=SimpleNamespace(asynchronous=True))
    training = SimpleNamespace(config=config, world=world, step=1)
    monkeypatch.setattr(saving.resume, "stage", lambda training, copy: write)
    saver = saving.Saver(training, checkpoints, lambda path: None)
    saver.save()
    return saver


@pytest.mark.parametrize(("error", "saved"), [(OUT_OF_MEMORY, [1]), (LOST, [])])
def test_a_save_has_time_to_end_unless_a_rank_is_lost(
    saver, checkpoints, released, monkeypatch, error, saved
):
    monkeypatch.setattr(saving, "NOTICE", 0.01)
    threading.Timer(0.3, released.set).start()
    saver.abandon(error)
    assert list(checkpoints.steps()) == saved


def test_it_has_so_too_if_the_others_cannot_be_asked(
    saver, world, checkpoints, released, monkeypatch
):
    def fail(value):
        raise OUT_OF_MEMORY

    monkeypatch.setattr(world, "gather", fail)
    with pytest.raises(RuntimeError, match="out of memory") as failure:
        saver.finish()
    threading.Timer(0.3, released.set).start()
    saver.abandon(failure.value)
    assert list(checkpoints.steps()) == [1]

"""When a run is one that is started again, and which checkpoint it then begins with."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from core_plugin.errors import ConfigError
from core_plugin.training import resume
from core_plugin.training.world import Place, World


class Alone(World):
    """One rank of a world, without the others."""

    def __init__(self, rank=0):
        super().__init__(Place(rank, rank, 2, 2), None)

    @contextmanager
    def together(self, *_, **__):
        yield

    def from_first(self, value):
        return value


def config(directory, wish="none"):
    return SimpleNamespace(checkpoint=SimpleNamespace(directory=str(directory), resume=wish))


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Starts the ranks; what comes back is whether they take themselves for started again."""

    def attempt(run_id=None, count=0, begins=True):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        if run_id:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        restarted = resume.is_restarted(config(tmp_path), Alone())
        if begins:
            resume.mark_launch(config(tmp_path), Alone())
        return restarted

    return attempt


def test_all_attempts_of_a_launch_with_a_name_are_one_run(attempt):
    assert not attempt("a")
    assert attempt("a", count=1)
    assert attempt("a"), "another host's agent was the first here, and none of its workers failed"
    assert not attempt("b")


def test_a_launch_without_a_name_is_told_by_its_agent(attempt):
    assert not attempt("none")
    assert attempt("none", count=1)
    assert not attempt("none")
    assert not attempt()


def test_a_launch_that_failed_before_it_began_does_not_take_anothers_mark_for_its_own(attempt):
    assert not attempt("a")
    assert not attempt("b", begins=False)
    assert not attempt("b", count=1)
    assert not attempt("none", begins=False)
    assert not attempt("none", count=1)


class Saved:
    """The checkpoints of some steps in a run's directory."""

    def __init__(self, *steps):
        self._steps = {step: Path(f"step-{step}") for step in steps}

    def steps(self):
        return self._steps

    def newest(self):
        return self._steps[max(self._steps)] if self._steps else None

    def verify(self, path):
        return []


def test_a_run_that_is_started_again_goes_on_from_its_own_checkpoint_or_else_as_asked(tmp_path):
    (tmp_path / resume.RUN_FILE).write_text(json.dumps({"step": 2}))
    asked = config("run", str(tmp_path))
    assert resume.choose(asked, Saved(), restarted=True) == tmp_path
    assert resume.choose(asked, Saved(3, 4), restarted=True) == Path("step-4")
    assert resume.choose(config("run"), Saved(), restarted=True) is None
    assert resume.choose(config("run"), Saved(3), restarted=True) == Path("step-3")
    with pytest.raises(ConfigError, match="has checkpoints after"):
        resume.choose(asked, Saved(3, 4), restarted=False)


@pytest.mark.parametrize(("run_id", "told"), [("none", True), ("a", False), (None, False)])
def test_torchrun_without_a_name_is_told_to_resume(run_id, told, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if run_id:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    with pytest.raises(ConfigError, match="has checkpoints already") as error:
        resume.choose(config("run"), Saved(3), restarted=False)
    assert ("--rdzv-id" in str(error.value)) is told


def test_a_directory_that_the_hosts_do_not_share_is_a_mistake(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "SEEN_WITHIN", 0.0)
    with pytest.raises(ConfigError, match=r"rank 1 does not see in .* that all hosts share"):
        resume.mark_launch(config(tmp_path), Alone(rank=1))
    (tmp_path / resume.LAUNCH_MARK).write_text("none 0")
    with pytest.raises(ConfigError, match="rank 1 does not see"):
        resume.mark_launch(config(tmp_path), Alone(rank=1))


def test_a_wish_that_is_no_directory_is_told_with_what_may_be_wished(tmp_path):
    checkpoints = SimpleNamespace(steps=dict)
    with pytest.raises(ConfigError, match="'newest', which is no directory; write none, auto or"):
        resume.choose(config(tmp_path, "newest"), checkpoints, restarted=False)

"""Saves in the background: training goes on, and whatever happens then loses nothing."""

from __future__ import annotations

import json

import pytest
import torch

from core_plugin import config
from core_plugin.errors import ConfigError
from core_plugin.training.saved import description, verify
from core_plugin.types import DistributedPlugin
from core_plugin_fsdp2.plugin import FSDP2

STEPS = {"steps": 6, "global_batch_size": 6, "micro_batch_size": 1}


def job(workspace, strategy, ranks=1, *, hooks=(), **checkpoint):
    return workspace.small(
        distributed=strategy,
        train=STEPS,
        checkpoint={"every": 2, "keep": 10, "asynchronous": True} | checkpoint,
        hooks=["jsonl", *hooks],
        peft={"name": "lora", "r": 2, "lora_dropout": 0.1} if strategy == "fsdp2" else None,
    )


def fault(step, rank=0, what="kill"):
    return {"name": "faults", "step": step, "rank": rank, "what": what}


def held_back(step, until):
    return {"name": "slow-disk", "step": step, "until": until}


def run(workspace, document, ranks=1):
    return workspace.run(["train", str(workspace.write(document, ranks, "run"))])


def events(workspace, rank=0):
    return (workspace.path / f"saved-{rank}").read_text().splitlines()


def left_over(workspace):
    return [p.name for p in (workspace.path / "run" / "checkpoints").glob(".*")]


def test_a_kill_while_a_save_is_under_way_loses_nothing(workspace):
    """On two ranks, with an adapter; the run that is compared saves at once."""
    at_once = job(workspace, "fsdp2", asynchronous=False)
    expected = workspace.train(at_once, 2, directory="at-once")
    hooks = [held_back(step=4, until=100), fault(step=5, rank=1)]
    code, output = run(workspace, job(workspace, "fsdp2", hooks=hooks), 2)
    assert code != 0, output
    assert [p.name for p in workspace.checkpoints()] == ["step-00000002"]
    assert left_over(workspace) in ([], [".partial-step-00000004"])
    resumed = workspace.train(job(workspace, "fsdp2"), 2, "--resume")
    assert [m["step"] for m in resumed] == [1, 2, 3, 4, 5, 6]
    assert [m["loss"] for m in resumed] == [m["loss"] for m in expected]
    assert left_over(workspace) == []
    compare_checkpoints(workspace, "run", "at-once")


def compare_checkpoints(workspace, first, second):
    """All files of all checkpoints, but for what says how they were saved."""
    ours, theirs = workspace.checkpoints(first), workspace.checkpoints(second)
    assert [p.name for p in ours] == [p.name for p in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert verify(one) == verify(other) == []
        assert description(one)["loss"] == description(other)["loss"] is not None
        one, other = digests(one), digests(other)
        assert one.keys() == other.keys()
        differing = {name for name in one if one[name] != other[name]}
        assert differing <= {"run.json", "state/.metadata"}
    ours, theirs = workspace.saved_tensors(first), workspace.saved_tensors(second)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def digests(checkpoint):
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items()}


def test_steps_go_on_while_a_save_is_under_way_and_all_ranks_hear_of_it_together(workspace):
    document = job(workspace, "ddp", hooks=[held_back(step=2, until=4)])
    metrics = workspace.train(document, 2)
    heard = events(workspace)
    assert heard == events(workspace, 1)
    assert [line.split()[0] for line in heard] == [p.name for p in workspace.checkpoints()]
    # step 2 is held back until after step 4, whose save waits for it
    assert heard[0] == "step-00000002 is complete at 4"
    assert heard[2] == "step-00000006 is complete at 6"
    losses = [m["loss"] for m in metrics]
    of_steps = (losses[:2], losses[2:4], losses[4:])
    for path, two in zip(workspace.checkpoints(), of_steps, strict=True):
        assert description(path)["loss"] == pytest.approx(sum(two) / 2)


def test_a_save_that_fails_on_one_rank_ends_all(workspace):
    """It fails on its own, while the other rank's thread waits for it."""
    hooks = [fault(step=3, what="full disk after the tensors")]
    code, output = run(workspace, job(workspace, "ddp", hooks=hooks, every=4), 2)
    assert code == 1, output
    assert "saving the checkpoint run/checkpoints/step-00000004 failed on rank 0" in output
    assert "No space left on device" in output
    assert "Traceback" not in output
    assert output.count("error:") == 1
    assert workspace.checkpoints() == []
    assert left_over(workspace) == []


def test_an_interrupt_waits_for_the_save_that_is_under_way_and_saves(workspace):
    hooks = [held_back(step=2, until=3), fault(step=3, what="interrupt")]
    code, output = run(workspace, job(workspace, "none", hooks=hooks))
    assert code == 130, output
    assert [p.name for p in workspace.checkpoints()] == ["step-00000002", "step-00000004"]
    assert left_over(workspace) == []


def test_a_strategy_that_only_saves_at_once_is_refused_before_anything_starts():
    class Own(FSDP2):
        @classmethod
        def save_checkpoint(cls, model, optimizer, directory, *, include_frozen):
            raise NotImplementedError

    class Both(Own):
        @classmethod
        def stage_checkpoint(cls, model, optimizer, *, include_frozen):
            raise NotImplementedError

    DistributedPlugin("saves-at-once").register()(Own)
    DistributedPlugin("saves-both-ways").register()(Both)
    document = {"train": {"steps": 1}, "checkpoint": {"asynchronous": True}}
    with pytest.raises(ConfigError, match="'saves-at-once' has a save_checkpoint of its own, but"):
        config.resolve({**document, "distributed": "saves-at-once"})
    config.resolve({**document, "distributed": "saves-both-ways"})
    config.resolve({"train": {"steps": 1}, "distributed": "saves-at-once"})

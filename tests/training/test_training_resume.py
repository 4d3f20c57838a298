"""Whatever happens to a run, going on with it gives what it would have given."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time

import pytest
import torch

STEPS = {"steps": 6, "global_batch_size": 6, "micro_batch_size": 1}


def job(workspace, strategy, **changes):
    return workspace.small(
        distributed=strategy, train=STEPS, checkpoint={"every": 2, "keep": 10}, **changes
    )


def interrupted(workspace, document, ranks, step=4, directory="run", **fault):
    """Run, with a fault on the last rank after a step that was saved or is yet to be."""
    fault = {"name": "faults", "step": step, "rank": ranks - 1} | fault
    file = workspace.write({**document, "hooks": [*document["hooks"], fault]}, ranks, directory)
    return workspace.run(["train", str(file)])


def final_state(workspace, directory="run"):
    return workspace.saved_tensors(directory)


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(actual[n], expected[n])] == []


@pytest.mark.parametrize(
    ("strategy", "ranks", "changes"),
    [
        ("none", 1, {}),
        ("ddp", 2, {"optimizer": {"name": "muon"}}),
        ("fsdp2", 2, {}),
        ("fsdp2", 3, {"optimizer": {"name": "muon"}}),
        ("fsdp2", 2, {"peft": {"name": "lora", "r": 2, "lora_dropout": 0.1}}),
        ("ddp", 2, {"peft": {"name": "lora", "r": 2, "lora_dropout": 0.1}}),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(workspace, strategy, ranks, changes):
    document = job(workspace, strategy, **changes)
    expected = workspace.train(document, ranks, directory="undisturbed")
    code, output = interrupted(workspace, document, ranks, step=5)
    assert code != 0, output
    resumed = workspace.train(document, ranks, "--resume")
    assert [m["step"] for m in resumed] == [1, 2, 3, 4, 5, 6]
    assert [m["loss"] for m in resumed] == [m["loss"] for m in expected]
    assert [m["grad_norm"] for m in resumed] == [m["grad_norm"] for m in expected]
    assert_same_bits(final_state(workspace), final_state(workspace, "undisturbed"))


def test_muons_state_is_in_the_checkpoint_and_comes_back(workspace):
    document = job(workspace, "fsdp2", optimizer={"name": "muon"})
    workspace.train(document, 2)
    momentum = {n: t for n, t in final_state(workspace).items() if n.endswith("momentum_buffer")}
    assert len(momentum) == 2 * 7
    assert all(t.abs().max() > 0 for t in momentum.values())


@pytest.mark.parametrize("seed", range(4))
def test_a_kill_at_a_random_moment_loses_nothing(workspace, seed):
    document = job(workspace, "fsdp2")
    document["checkpoint"]["every"] = 1
    expected = workspace.train(document, 2, directory="undisturbed")
    moment = random.Random(seed)
    command = workspace.start(["train", str(workspace.write(document, 2, "run"))])
    deadline = time.monotonic() + 60
    target = moment.randrange(1, 5)
    while len(workspace.checkpoints()) < target and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(moment.random() * 0.05)
    command.kill()
    resumed = workspace.train(document, 2, "--resume")
    assert [m["loss"] for m in resumed] == [m["loss"] for m in expected]
    assert_same_bits(final_state(workspace), final_state(workspace, "undisturbed"))


@pytest.mark.parametrize(
    ("moment", "rank"), [("writing tensors", 1), ("hashing", 1), ("completing", 0)]
)
def test_a_kill_in_the_middle_of_a_save_loses_nothing(workspace, moment, rank):
    document = job(workspace, "fsdp2")
    expected = workspace.train(document, 2, directory="undisturbed")
    code, output = interrupted(workspace, document, 2, step=3, rank=rank, what=f"kill in {moment}")
    assert code != 0, output
    assert [p.name for p in workspace.checkpoints()] == ["step-00000002"]
    resumed = workspace.train(document, 2, "--resume")
    assert [m["loss"] for m in resumed] == [m["loss"] for m in expected]
    assert_same_bits(final_state(workspace), final_state(workspace, "undisturbed"))


def test_every_strategy_goes_on_from_every_other_ones_checkpoint(workspace):
    constant = {"scheduler": "constant"}  # a schedule over six steps is another one over four
    document = job(workspace, "none", **constant)
    expected = [m["loss"] for m in workspace.train(document, 1, directory="undisturbed")]
    sources = {"none": 1, "ddp": 2, "fsdp2": 2}
    for source, ranks in sources.items():
        changed = {**job(workspace, source, **constant), "train": {**STEPS, "steps": 4}}
        workspace.train(changed, ranks, directory=f"from-{source}")
    targets = [("none", 1), ("ddp", 3), ("fsdp2", 3), ("fsdp2", 2)]
    for source in sources:
        for target, ranks in targets:
            if source == target and sources[source] == ranks:
                continue
            directory = f"{source}-to-{target}-{ranks}"
            shutil.copytree(workspace.path / f"from-{source}", workspace.path / directory)
            metrics = workspace.train(
                job(workspace, target, **constant), ranks, "--resume", directory=directory
            )
            losses = [m["loss"] for m in metrics]
            assert losses == pytest.approx(expected, rel=1e-5), directory


def test_an_interrupt_saves_and_says_how_to_go_on(workspace):
    document = job(workspace, "ddp")
    expected = workspace.train(document, 2, directory="undisturbed")
    code, output = interrupted(workspace, document, 2, step=3, what="interrupt")
    assert code == 130, output
    assert "--resume" in output
    assert "Traceback" not in output
    assert workspace.checkpoints()[-1].name == "step-00000004"
    resumed = workspace.train(document, 2, "--resume")
    assert [m["loss"] for m in resumed] == [m["loss"] for m in expected]


def test_ctrl_c_in_a_terminal_saves_on_every_rank(workspace):
    document = job(workspace, "fsdp2")
    document["train"] = {**STEPS, "steps": 100_000}
    document["checkpoint"] = {}
    command = workspace.start(["train", str(workspace.write(document, 2, "run"))])
    deadline = time.monotonic() + 60
    while len(workspace.metrics()) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(command.pid, signal.SIGINT)
    code, output = command.wait(60)
    assert code == 130, output
    assert "--resume" in output
    assert "Traceback" not in output
    (saved,) = workspace.checkpoints()
    assert saved.name == f"step-{workspace.metrics()[-1]['step']:08d}"


@pytest.mark.parametrize(("strategy", "ranks"), [("none", 1), ("ddp", 2)])
def test_ctrl_c_before_the_first_step_just_ends_the_run(workspace, strategy, ranks):
    document = job(workspace, strategy, kernels=["interrupted"])
    code, output = workspace.run(["train", str(workspace.write(document, ranks, "run"))])
    assert code == 130, output
    assert "stopped before the first step" in output
    assert "Traceback" not in output
    assert workspace.checkpoints() == []


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_an_elastic_restart_goes_on_from_the_newest_checkpoint(workspace, start_method):
    document = job(workspace, "fsdp2")
    expected = workspace.train(document, 2, directory="undisturbed")
    fault = {"name": "faults", "step": 3, "rank": 1, "once": True}
    launcher = {"name": "torchrun", "processes_per_host": 2, "max_restarts": 1}
    launcher["start_method"] = start_method
    resumed = workspace.train({**document, "hooks": ["jsonl", fault], "launcher": launcher}, 2)
    assert (workspace.path / "done").exists()
    assert [m["loss"] for m in resumed] == [m["loss"] for m in expected]


def test_a_run_whose_loss_is_not_finite_ends_and_saves_nothing_of_it(workspace):
    document = job(workspace, "none", optimizer={"name": "sgd", "lr": 1e30})
    document["train"] = {**STEPS, "log_every": 6, "max_grad_norm": None}
    code, output = workspace.run(["train", str(workspace.write(document, 1, "run"))])
    assert code == 1, output
    assert "grad_norm is" in output
    assert workspace.checkpoints() == []


def test_other_data_than_the_checkpoints_is_refused(workspace):
    document = job(workspace, "none")
    workspace.train({**document, "train": {**STEPS, "steps": 2}})
    corpus = workspace.path / "corpus.txt"
    corpus.write_text(corpus.read_text() * 2)
    code, output = workspace.run(["train", str(workspace.write(document, 1, "run")), "--resume"])
    assert code == 1, output
    assert "the data had" in output


def test_a_restart_does_not_take_another_runs_checkpoints_for_its_own(workspace):
    document = job(workspace, "ddp")
    workspace.train({**document, "train": {**STEPS, "steps": 2}}, 2)
    launcher = {"name": "torchrun", "processes_per_host": 2, "max_restarts": 1}
    file = workspace.write({**document, "launcher": launcher}, 2, "run")
    code, output = workspace.run(["train", str(file)])
    assert code == 2, output
    assert "has checkpoints already" in output
    assert [p.name for p in workspace.checkpoints()] == ["step-00000002"]


def test_losses_that_were_not_logged_yet_are_logged_after_a_resume(workspace):
    document = job(workspace, "fsdp2")
    document["train"] = {**STEPS, "log_every": 4}
    expected = workspace.train(document, 2, directory="undisturbed")
    code, output = interrupted(workspace, document, 2, step=3, what="kill")
    assert code != 0, output
    assert workspace.checkpoints()[-1].name == "step-00000002"
    resumed = workspace.train(document, 2, "--resume")
    assert [(m["step"], m["loss"]) for m in resumed] == [(m["step"], m["loss"]) for m in expected]
    shutil.rmtree(workspace.path / "run")
    interrupted(workspace, document, 2, step=3, what="kill")
    alone = workspace.train(document, 3, "--resume")
    assert [m["loss"] for m in alone] == pytest.approx([m["loss"] for m in expected], rel=1e-5)


def test_what_is_changed_on_purpose_counts(workspace):
    document = job(workspace, "none", scheduler="constant")
    workspace.train({**document, "train": {**STEPS, "steps": 2}})
    changes = ["--resume", "checkpoint.allow_changes=true", "optimizer.lr=0.5"]
    metrics = workspace.train(document, 1, *changes)
    assert [m["lr"] for m in metrics] == [0.01] * 2 + [0.5] * 4


def test_an_earlier_checkpoint_is_not_gone_on_from_in_the_same_place(workspace):
    document = job(workspace, "none")
    workspace.train(document)
    earlier = workspace.checkpoints()[0]
    file = workspace.write(document, 1, "run")
    code, output = workspace.run(["train", str(file), f"checkpoint.resume={earlier}"])
    assert code == 2, output
    assert "has checkpoints after" in output
    elsewhere = workspace.train(document, 1, f"checkpoint.resume={earlier}", directory="elsewhere")
    assert [m["step"] for m in elsewhere] == [3, 4, 5, 6]


@pytest.mark.parametrize("what", ["full disk for generators", "full disk for the optimizer"])
def test_a_save_that_fails_before_any_exchange_hangs_no_rank(workspace, what):
    started = time.monotonic()
    code, output = interrupted(workspace, job(workspace, "fsdp2"), 2, step=3, what=what)
    assert code == 1, output
    assert "No space left on device" in output
    assert time.monotonic() - started < 60
    assert [p.name for p in workspace.checkpoints()] == ["step-00000002"]


def test_a_failing_save_on_one_rank_ends_all_and_leaves_nothing(workspace):
    code, output = interrupted(workspace, job(workspace, "fsdp2"), 2, step=3, what="full disk")
    assert code == 1, output
    assert "No space left on device" in output
    assert "Traceback" not in output
    assert [p.name for p in workspace.checkpoints()] == ["step-00000002"]
    assert not list((workspace.path / "run" / "checkpoints").glob(".*"))


def test_an_exception_on_one_rank_ends_the_others(workspace):
    started = time.monotonic()
    code, output = interrupted(workspace, job(workspace, "fsdp2"), 2, step=3, what="raise")
    assert code == 1, output
    assert "a fault of this hook" in output
    assert time.monotonic() - started < 60


def test_a_flipped_bit_is_found_and_the_checkpoint_before_it_used(workspace):
    document = job(workspace, "fsdp2")
    expected = workspace.train(document, 2)
    damaged = next(workspace.checkpoints()[-1].glob("state/*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    code, output = workspace.run(
        [
            "train",
            str(workspace.write(document, 2, "run")),
            f"checkpoint.resume={damaged.parents[1]}",
        ]
    )
    assert code == 1, output
    assert "SHA-256" in output
    assert damaged.name in output
    resumed = workspace.train(document, 2, "--resume")
    assert [m["loss"] for m in resumed] == [m["loss"] for m in expected]


def test_a_run_that_has_changed_is_refused_with_what_changed(workspace):
    document = job(workspace, "none")
    workspace.train({**document, "train": {**STEPS, "steps": 2}})
    changed = {**document, "optimizer": {"name": "adamw", "lr": 0.5}}
    code, output = workspace.run(["train", str(workspace.write(changed, 1, "run")), "--resume"])
    assert code == 1, output
    assert "optimizer.lr was 0.01 and is 0.5" in output
    workspace.train(changed, 1, "--resume", "checkpoint.allow_changes=true")


def test_another_models_checkpoint_is_refused_by_its_tensors(workspace):
    document = job(workspace, "none")
    workspace.train({**document, "train": {**STEPS, "steps": 2}})
    model = {**document["model"], "intermediate_size": 24, "tie_embeddings": True}
    file = workspace.write({**document, "model": model}, 1, "run")
    code, output = workspace.run(["train", str(file), "--resume", "checkpoint.allow_changes=true"])
    assert code == 1, output
    assert "model.lm_head.weight is in it, but not in the run" in output
    assert "has the shape" in output


def test_a_new_run_does_not_mix_with_an_old_one(workspace):
    document = job(workspace, "none")
    workspace.train({**document, "train": {**STEPS, "steps": 2}})
    code, output = workspace.run(["train", str(workspace.write(document, 1, "run"))])
    assert code == 2
    assert "--resume" in output


def test_a_directory_that_cannot_be_written_into_is_a_fault_of_the_configuration(workspace):
    (workspace.path / "run").write_text("a file")
    code, output = workspace.run(["train", str(workspace.write(job(workspace, "ddp"), 2, "run"))])
    assert code == 2, output
    assert "checkpoint.directory: run cannot be written into" in output
    assert "Traceback" not in output
    assert output.count("error:") == 1


def test_going_on_says_from_where(workspace):
    document = job(workspace, "none")
    file = workspace.write(document, 1, "run")
    assert (
        "no checkpoint in run: starting anew" in workspace.run(["train", str(file), "--resume"])[1]
    )
    _, output = workspace.run(["train", str(file), "--resume", "train.steps=8"])
    assert "going on from run/checkpoints/step-00000006" in output
    _, output = workspace.run(["train", str(file), "--resume", "train.steps=8"])
    assert "nothing to do: 8 steps are done" in output


def test_a_hook_with_arguments_that_no_event_has_is_named(workspace):
    document = job(workspace, "ddp", hooks=["misspelt"])
    code, output = workspace.run(["train", str(workspace.write(document, 2, "run"))])
    assert code == 1, output
    assert "the hook 'misspelt'" in output
    assert "on_log(run, metrics)" in output
    assert "Traceback" not in output


def test_only_the_newest_checkpoints_are_kept(workspace):
    document = job(workspace, "none")
    document["checkpoint"] = {"every": 1, "keep": 2}
    workspace.train(document)
    assert [p.name for p in workspace.checkpoints()] == ["step-00000005", "step-00000006"]


def test_a_lora_checkpoint_holds_the_adapter_alone(workspace):
    document = job(workspace, "fsdp2", peft={"name": "lora", "r": 2})
    workspace.train(document, 2)
    names = final_state(workspace)
    assert names
    assert all("lora_" in name for name in names)
    adapter = workspace.checkpoints()[-1] / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["peft_type"] == "LORA"
    assert (adapter / "adapter_model.safetensors").stat().st_size > 0

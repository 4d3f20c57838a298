"""What a run says when something is wrong: who did it, where, and what helps."""

from __future__ import annotations

import os
import re

import pytest

PLUGINS = """\
import os


def optimizer(model, params):
    import torch

    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            if os.environ["RANK"] == "1":
                self._divide(0)

        def _divide(self, by):
            torch.ones(1).apply_(lambda one: 1 / by)

    return Broken(model.parameters(), lr=0.1)


def kernel(model, params):
    if os.environ["RANK"] == "1":
        raise KeyError("kernel")
    return model


def scheduler(optimizer, params, *, steps):
    return 1 / (int(os.environ["RANK"]) - 1)
"""


@pytest.fixture
def broken(workspace):
    """Runs a job on two ranks with a broken plugin of a third party; its folder is cut off."""
    site = workspace.path / "site"
    info = site / "acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    names = ("optimizer", "kernel", "scheduler")
    groups = (f"[core_plugin.{name}]\nacme = acme_plugins:{name}\n" for name in names)
    (info / "entry_points.txt").write_text("".join(groups))
    (site / "acme_plugins.py").write_text(PLUGINS)
    workspace.environment["PYTHONPATH"] += os.pathsep + str(site)

    def run(slot, *options):
        plugin = ["acme"] if slot == "kernels" else "acme"
        file = workspace.write(workspace.small(distributed="ddp", **{slot: plugin}), 2, "run")
        code, output = workspace.run([*options, "train", str(file)])
        assert code == 1, output
        return output.replace(f"{site}/", "")

    return run


def test_a_bug_in_an_optimizers_step_is_told_with_its_rank_plugin_and_place(broken):
    output = broken("optimizer")
    assert (
        "error: rank 1: acme_plugins.py:14: optimizer 'acme' of acme 1.0: "
        "ZeroDivisionError: division by zero\n"
    ) in output
    assert output.count("Traceback (most recent call last)") == 1
    assert "self._divide(0)" in output
    assert "error: rank 0 lost contact with another rank (step 1), which has failed" in output
    assert "go on with --resume" in output
    assert "gloo" not in output


def test_debug_shows_the_tracebacks_of_all_workers(broken):
    output = broken("optimizer", "--debug")
    assert output.count("Traceback (most recent call last)") > 1
    assert "self._divide(0)" in output
    assert "gloo" in output
    assert "--debug" not in output


@pytest.mark.parametrize(
    ("slot", "told"),
    [
        (
            "kernels",
            "building the model failed on rank 1: acme_plugins.py:21: kernel 'acme' of acme 1.0: "
            "KeyError: 'kernel'",
        ),
        (
            "scheduler",
            "making the optimizer failed on rank 1: acme_plugins.py:26: scheduler 'acme' of acme "
            "1.0: ZeroDivisionError: division by zero",
        ),
    ],
)
def test_a_bug_in_the_set_up_is_told_once_and_debug_shows_its_traceback(broken, slot, told):
    output = broken(slot)
    assert output.count(f"error: {told}\nrun with --debug for the traceback\n") == 1
    assert "Traceback" not in output
    output = broken(slot, "--debug")
    assert output.count(f"error: {told}\n") == 1
    assert output.count('acme_plugins.py", line') == 1


def test_data_that_is_not_there_is_told_with_the_line_or_the_override(workspace):
    document = workspace.small(distributed="ddp")
    document["data"]["path"] = "gone.txt"
    file = workspace.write(document, 2, "run")
    code, output = workspace.run(["train", str(file)])
    assert code == 2, output
    assert output == f"error: {file}:1: data.path: gone.txt does not exist\n"
    code, output = workspace.run(["train", str(file), "--dry-run", "data.path=lost.txt"])
    assert code == 2, output
    assert output == "error: override 'data.path=lost.txt': data.path: lost.txt does not exist\n"


def test_a_run_that_has_nothing_to_do_leaves_its_configuration_as_it_was(workspace):
    document = workspace.small()
    workspace.train(document)
    kept = workspace.path / "run" / "config.yaml"
    before = kept.read_text()
    code, output = workspace.run(
        [
            "train",
            str(workspace.path / "run.yaml"),
            "--resume",
            "train.steps=2",
            "train.log_every=3",
        ]
    )
    assert code == 0, output
    assert "nothing to do: 4 steps are done" in output
    assert kept.read_text() == before
    workspace.train(document, 1, "--resume", "train.log_every=2", "train.steps=4")
    assert kept.read_text() == before


def test_what_allow_changes_cannot_mend_is_not_offered_it(workspace):
    document = workspace.small(train={"steps": 2, "global_batch_size": 2}, scheduler="constant")
    workspace.train(document)
    resumed = ["train", str(workspace.path / "run.yaml"), "--resume", "train.steps=3"]
    code, output = workspace.run([*resumed, "optimizer.lr=0.5"])
    assert code == 1, output
    assert output.endswith(
        "\n  optimizer.lr was 0.01 and is 0.5\n"
        "to go on all the same: checkpoint.allow_changes=true\n"
    )
    code, output = workspace.run([*resumed, "model.hidden_size=32"])
    assert code == 1, output
    assert "\n  model.hidden_size was 16 and is 32\nso what it holds does not fit:\n" in output
    assert re.search(r"has the shape \(\d+, 16\) in it, and \(\d+, 32\) in the run\n", output)
    assert re.search(r"\n  and \d+ more\nundo what has changed, or start anew in another", output)
    assert "allow_changes" not in output
    changed = workspace.run([*resumed, "optimizer.lr=0.5", "checkpoint.allow_changes=true"])
    assert changed[0] == 0, changed


def test_a_class_of_blocks_is_found_whatever_its_case(workspace):
    document = workspace.small()
    document["train"]["blocks"] = ["ATTENTION"]
    file = workspace.write(document, 1, "run")
    code, output = workspace.run(["train", str(file), "--dry-run"])
    assert code == 2, output
    assert "is a ATTENTION; did you mean Attention?" in output

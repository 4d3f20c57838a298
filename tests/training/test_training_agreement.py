"""What all ranks must have in common, and what a run must not silently do otherwise."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest


def torchruns_variables(ranks: int) -> list[dict[str, str]]:
    """What torchrun sets for each of its processes."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**world, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)]


def start_ranks(workspace, file: Path, variables, *, options=None, directories=None):
    """Start each rank by itself, as a cluster's own launcher does; they may differ."""
    options = options or [[]] * len(variables)
    directories = directories or [workspace.path] * len(variables)
    ranks = [
        workspace.start(["train", str(file), *more], directory, **of_rank)
        for more, directory, of_rank in zip(options, directories, variables, strict=True)
    ]
    ended = [rank.wait(90) for rank in ranks]
    return [code for code, _ in ended], [output for _, output in ended]


def test_ranks_with_different_configurations_end_with_a_table(workspace):
    file = workspace.write(workspace.small(distributed="ddp"), 2, "run")
    started = time.monotonic()
    codes, outputs = start_ranks(
        workspace, file, torchruns_variables(2), options=[[], ["optimizer.lr=0.5"]]
    )
    assert codes == [1, 1], outputs
    assert time.monotonic() - started < 60
    text = "".join(outputs)
    assert "the ranks do not run the same thing" in text
    assert "configuration:" in text
    assert "(rank 0)" in text
    assert "(rank 1)" in text
    assert "Traceback" not in text


def test_ranks_with_different_versions_of_a_plugin_end_with_a_table(workspace):
    paths = []
    for version in ("1.0", "1.1"):
        site = workspace.path / f"site-{version}"
        info = site / f"acme-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme\nVersion: {version}\n")
        (info / "entry_points.txt").write_text("[core_plugin.kernel]\nacme = acme:kernel\n")
        (site / "acme.py").write_text(
            f"def kernel(model, params):\n    return model  # {version}\n"
        )
        paths.append(os.pathsep.join([str(site), workspace.environment["PYTHONPATH"]]))
    file = workspace.write(workspace.small(distributed="ddp", kernels=["acme"]), 2, "run")
    variables = torchruns_variables(2)
    for of_rank, path in zip(variables, paths, strict=True):
        of_rank["PYTHONPATH"] = path
    codes, outputs = start_ranks(workspace, file, variables)
    assert codes == [1, 1], outputs
    text = "".join(outputs)
    assert "kernels acme" in text
    assert "acme 1.0" in text
    assert "acme 1.1" in text


def test_a_device_that_one_rank_lacks_ends_all_of_them(workspace):
    file = workspace.write(workspace.small(distributed="ddp", device="cpu"), 2, "run")
    codes, outputs = start_ranks(
        workspace, file, torchruns_variables(2), options=[[], ["device=cuda"]]
    )
    assert codes == [1, 1], outputs
    assert all("the device 'cuda' cannot be used here" in output for output in outputs)


def test_ranks_with_different_data_end_with_a_table(workspace):
    document = workspace.small(distributed="ddp")
    document["data"]["path"] = "own-corpus.txt"
    corpus = (workspace.path / "corpus.txt").read_text()
    for rank in (0, 1):
        (workspace.path / str(rank)).mkdir()
        (workspace.path / str(rank) / "own-corpus.txt").write_text(corpus[rank * 500 :])
    document["checkpoint"] = {"directory": str(workspace.path / "run")}
    file = workspace.write(document, 2, "run")
    directories = [workspace.path / "0", workspace.path / "1"]
    codes, outputs = start_ranks(workspace, file, torchruns_variables(2), directories=directories)
    assert codes == [1, 1], outputs
    assert "the ranks have different data" in "".join(outputs)


def test_a_fault_of_the_device_plugin_on_one_rank_ends_all_of_them(workspace):
    document = workspace.small(distributed="ddp", device={"name": "recording", "threads": 1})
    file = workspace.write(document, 2, "run")
    started = time.monotonic()
    variables = torchruns_variables(2)
    variables[1]["BROKEN_DEVICE"] = "1"
    codes, outputs = start_ranks(workspace, file, variables)
    assert codes == [1, 1], outputs
    assert "no such device" in "".join(outputs)
    assert time.monotonic() - started < 60


def test_ranks_that_agree_train(workspace):
    file = workspace.write(workspace.small(distributed="fsdp2"), 2, "run")
    codes, outputs = start_ranks(workspace, file, torchruns_variables(2))
    assert codes == [0, 0], outputs
    assert [m["step"] for m in workspace.metrics()] == [1, 2, 3, 4]


def test_the_tasks_of_a_slurm_step_are_the_ranks_of_a_run(workspace):
    file = workspace.write(workspace.small(distributed="ddp"), 2, "run")
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    step["SLURM_JOB_ID"] = str(os.getpid())
    tasks = [{**step, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)} for n in (0, 1)]
    codes, outputs = start_ranks(workspace, file, tasks)
    assert codes == [0, 0], outputs
    assert [m["step"] for m in workspace.metrics()] == [1, 2, 3, 4]


def test_torchrun_starts_the_ranks_of_a_run(workspace):
    file = workspace.write(workspace.small(distributed="fsdp2"), 2, "run")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "-m", "core_plugin", "train", str(file)],
        cwd=workspace.path,
        env=workspace.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [m["step"] for m in workspace.metrics()] == [1, 2, 3, 4]


def test_an_outer_launcher_with_another_number_of_processes_is_refused(workspace):
    file = workspace.write(workspace.small(distributed="fsdp2"), 3, "run")
    codes, outputs = start_ranks(workspace, file, torchruns_variables(2))
    assert codes == [2, 2], outputs
    assert "asks for 3 processes" in outputs[0]


def test_a_strategy_for_one_process_is_refused_on_two(workspace):
    code, output = workspace.run(
        ["validate", str(workspace.write(workspace.small(distributed="none"), 2, "run"))]
    )
    assert code == 2
    assert "2 processes, but the strategy 'none' is for one" in output
    document = workspace.small(distributed="none", launcher="local")
    codes, outputs = start_ranks(
        workspace, workspace.write(document, 1, "run"), torchruns_variables(2)
    )
    assert codes != [0, 0]
    assert "each would train by itself" in "".join(outputs)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ("stale_optimizer", "does not hold the parameters that the model trains"),
        ("partial_optimizer", "are in none of its groups"),
        ("UnshardedStrategy", "declares sharded_state, but this rank holds all"),
        ("ForgetfulStrategy", "on meta, without values"),
        ("InstanceMethods", "make it a static or class method"),
    ],
)
def test_a_plugin_that_does_not_do_what_it_says_is_found(workspace, plugin, message):
    site = workspace.path / "site"
    info = site / "wrong-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[core_plugin.optimizer]\n"
        "stale_optimizer = wrong:stale_optimizer\npartial_optimizer = wrong:partial_optimizer\n"
        "[core_plugin.distributed]\n"
        + "".join(
            f"{n} = wrong:{n}\n"
            for n in ("UnshardedStrategy", "ForgetfulStrategy", "InstanceMethods")
        )
    )
    (site / "wrong.py").write_text(WRONG)
    slot = "optimizer" if "optimizer" in plugin else "distributed"
    document = workspace.small(**{"distributed": "fsdp2", slot: plugin})
    workspace.environment["PYTHONPATH"] += os.pathsep + str(site)
    code, output = workspace.run(["train", str(workspace.write(document, 2, "run"))])
    assert code in (1, 2), output
    assert message in output
    assert "Traceback" not in output


WRONG = """
import copy

from core_plugin_ddp.plugin import DDP
from core_plugin.types import Capabilities


def stale_optimizer(model, params):
    import torch

    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)


def partial_optimizer(model, params):
    import torch

    return torch.optim.SGD(list(model.parameters())[1:], lr=0.1)


class UnshardedStrategy(DDP):
    capabilities = Capabilities(sharded_state=True)


class ForgetfulStrategy(DDP):
    @staticmethod
    def shard_model(model, params, context):
        return model

    @staticmethod
    def unwrap_model(model):
        return model


class InstanceMethods(DDP):
    def gradient_sync(self, model, enabled):
        return None
"""


def test_every_method_of_every_type_is_called(workspace):
    from core_plugin.config import SLOTS
    from core_plugin.contract import contract_methods
    from core_plugin.types.hook import Events

    recording = {"name": "recording"}
    document = workspace.small(
        model={**recording, "hidden_size": 16, "layers": 2, "heads": 2},
        data={**recording, "path": "corpus.txt", "sequence_length": 16, "vocabulary_size": 300},
        peft={**recording, "r": 2},
        kernels=["recording"],
        optimizer="recording",
        scheduler="recording",
        distributed="recording",
        device={**recording, "threads": 1},
        hooks=["recording", {"name": "faults", "step": 3, "what": "raise", "once": True}],
        launcher={**recording, "processes_per_host": 2},
        checkpoint={"every": 2},
    )
    code, output = workspace.run(["train", str(workspace.write(document, 2, "run"))])
    assert code == 1, output
    assert "a fault of this hook" in output
    workspace.train(document, 2, "--resume")
    document["peft"]["weights"] = str(workspace.checkpoints()[-1] / "adapter")
    document["checkpoint"]["asynchronous"] = True
    workspace.train(document, 2, directory="from-its-adapter")
    calls = workspace.calls()
    expected = {
        f"{slot.plugin_type.type_name}.{method}"
        for slot in SLOTS.values()
        if isinstance(slot.plugin_type.contract, type)
        for method in contract_methods(slot.plugin_type.contract)
    }
    expected |= {"optimizer", "scheduler", "kernel", "hook.on_error ValueError"}
    expected |= {f"hook.{e}" for e in vars(Events) if e.startswith("on_") and e != "on_error"}
    # the planner's, before a run, and the export's, after it
    not_of_a_run = {"distributed.plan_memory", "model.untied"}
    not_of_a_run |= {"model.transformers_config", "data.end_token"}
    assert expected - calls - not_of_a_run == set()

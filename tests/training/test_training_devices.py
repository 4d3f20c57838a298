"""Runs on the fake device: only ``device`` in the YAML differs from those on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

MUON = {"name": "muon", "lr": 3e-3, "ns_dtype": "float32"}
LORA = {"name": "lora", "r": 2, "target_modules": "all-linear"}


def losses(metrics: list[dict[str, float]]) -> list[float]:
    return [m["loss"] for m in metrics]


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (1, {}),
        (2, {"distributed": "ddp"}),
        (2, {"distributed": "fsdp2"}),
        (2, {"distributed": "ddp", "optimizer": MUON}),
        (2, {"distributed": "fsdp2", "optimizer": MUON}),
        (2, {"distributed": "ddp", "peft": LORA}),
        (2, {"distributed": "fsdp2", "peft": LORA}),
        (4, {"distributed": {"name": "fsdp2", "replicas": 2}, "device": {"devices": 4}}),
    ],
    ids=["none", "ddp", "fsdp2", "ddp muon", "fsdp2 muon", "ddp lora", "fsdp2 lora", "hybrid"],
)
def test_losses_and_tensors_are_those_of_the_cpu(workspace, ranks, changes):
    device = {"name": "fake"} | changes.pop("device", {})
    on_cpu = workspace.train(workspace.small(**changes), ranks, directory="cpu")
    on_fake = workspace.train(workspace.small(**changes, device=device), ranks, directory="fake")
    assert len(on_fake) == 4
    assert losses(on_fake) == pytest.approx(losses(on_cpu), rel=1e-6)
    expected = workspace.saved_tensors("cpu")
    actual = workspace.saved_tensors("fake")
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, msg=name)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_bf16_is_computed_on_the_device(workspace, strategy):
    """torch takes other operators for norms, and keeps others in float32, than on the CPU."""
    train = {"steps": 4, "global_batch_size": 4, "micro_batch_size": 2}
    small = workspace.small(distributed=strategy)
    fp32 = workspace.train(small | {"device": "fake"}, 2, directory="fp32")
    small["train"] = train | {"precision": "bf16"}
    on_cpu = workspace.train(small, 2, directory="cpu")
    on_fake = workspace.train(small | {"device": "fake"}, 2, directory="fake")
    assert losses(on_fake) == pytest.approx(losses(on_cpu), rel=3e-4)
    assert losses(on_fake) != pytest.approx(losses(fp32), rel=1e-6)


@pytest.mark.parametrize(("first", "second"), [("fake", "cpu"), ("cpu", "fake")])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_run_goes_on_on_another_device(workspace, strategy, first, second):
    def run(device: str, steps: int, directory: str, *options: str) -> list[float]:
        train = {"steps": steps, "global_batch_size": 4, "micro_batch_size": 2}
        document = workspace.small(
            distributed=strategy, scheduler="constant", device=device, train=train
        )
        return losses(workspace.train(document, 2, *options, directory=directory))

    whole = run("cpu", 4, "whole")
    run(first, 2, "resumed")
    resumed = run(second, 4, "resumed", "--resume")
    assert resumed == pytest.approx(whole, rel=1e-6)


def test_a_lesser_device_saves_and_goes_on_from_the_cpu(workspace):
    """Without pinned memory for copies to the host, and without the CPU's fused AdamW."""
    device = {"name": "fake", "without": ["pinned_memory", "fused_optimizers"]}

    def run(device: object, steps: int, directory: str, *options: str) -> list[float]:
        train = {"steps": steps, "global_batch_size": 4, "micro_batch_size": 2}
        document = workspace.small(scheduler="constant", device=device, train=train)
        return losses(workspace.train(document, 1, *options, directory=directory))

    whole = run("cpu", 4, "whole")
    run("cpu", 2, "resumed")
    assert run(device, 4, "resumed", "--resume") == pytest.approx(whole, rel=1e-6)
    assert run("cpu", 4, "resumed", "--resume") == pytest.approx(whole, rel=1e-6)


def reductions(workspace: Any, directory: str) -> set[str]:
    """The operations that reduced gradients on rank 0, as the collective library saw them."""
    lines = (workspace.path / directory / "rank-0.txt").read_text().splitlines()
    calls = [line.split() for line in lines]
    return {
        f"{call[0]} {call[1]}"
        for call in calls
        if call[0] in ("all_reduce", "reduce_scatter_single") and int(call[3]) > 100
    }


@pytest.mark.parametrize(
    ("strategy", "ranks", "expected"),
    [
        ({"name": "ddp"}, 2, {"all_reduce"}),
        ({"name": "fsdp2"}, 2, {"reduce_scatter_single"}),
        ({"name": "fsdp2", "replicas": 2}, 4, {"reduce_scatter_single", "all_reduce"}),
    ],
    ids=["ddp", "fsdp2", "hybrid"],
)
def test_gradients_are_averaged_as_asked_and_come_out_equal(workspace, strategy, ranks, expected):
    found = {}
    for name, wanted, without, operation in (
        ("auto", "auto", [], "AVG"),
        ("in", True, [], "AVG"),
        ("after", False, [], "SUM"),
        ("lesser", "auto", ["average_in_collectives"], "SUM"),
    ):
        (workspace.path / f"calls-{name}").mkdir()
        workspace.environment["FAKECCL_TRACE"] = str(workspace.path / f"calls-{name}")
        document = workspace.small(
            distributed={**strategy, "average_in_collective": wanted},
            device={"name": "fake", "devices": ranks, "without": without},
        )
        found[name] = losses(workspace.train(document, ranks, directory=name))
        operations = {f"{call} {operation}" for call in expected}
        assert reductions(workspace, f"calls-{name}") == operations, name
    for name in ("in", "after", "lesser"):
        assert found[name] == pytest.approx(found["auto"], rel=1e-6)


def test_averaging_where_the_library_cannot_is_refused(workspace):
    for strategy in ("ddp", "fsdp2"):
        document = workspace.small(
            distributed={"name": strategy, "average_in_collective": True},
            device={"name": "fake", "without": ["average_in_collectives"]},
        )
        code, output = workspace.run(["train", str(workspace.write(document, 2, strategy))])
        assert code == 2, output
        assert "average_in_collective" in output
        assert "Traceback" not in output


def test_more_ranks_than_devices_are_refused(workspace):
    file = workspace.write(workspace.small(device="fake", distributed="ddp"), 3, "run")
    code, output = workspace.run(["train", str(file)])
    assert code == 1
    assert "local rank 2 needs fake:2, but there are 2 devices" in output
    assert "Traceback" not in output


def test_memory_that_does_not_suffice_ends_the_run(workspace):
    model = {"name": "decoder", "hidden_size": 256, "layers": 2, "heads": 2}
    device = {"name": "fake", "memory_mb": 1}
    document = workspace.small(model=model, device=device, distributed="ddp")
    code, output = workspace.run(["train", str(workspace.write(document, 2, "run"))])
    assert code == 1
    assert "out of memory" in output


def test_workarounds_are_active_while_the_device_is(workspace):
    for device, expected in (("fake", "True"), ("cpu", "False")):
        document = workspace.small(device=device, hooks=["workarounds"])
        workspace.train(document, directory=device)
        assert (workspace.path / "workarounds.txt").read_text() == expected


def test_a_declared_parameter_of_the_device_is_checked_before_anything_starts(workspace):
    file = workspace.write(
        workspace.small(device={"name": "fake", "without": ["steams"]}), 1, "run"
    )
    code, output = workspace.run(["validate", str(file)])
    assert code == 2
    assert "there is no capability steams" in output

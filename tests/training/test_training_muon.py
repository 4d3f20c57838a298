"""Runs with the optimizer muon: alike under every strategy, and on the fake device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

MUON = {"name": "muon", "lr": 3e-3, "ns_dtype": "float32"}
HYBRID = {"name": "fsdp2", "replicas": 2}


def job(workspace: Any, strategy: object, steps: int = 3, samples: int = 2, **changes: Any) -> Any:
    """A run in which two ranks, or one with two micro-batches, add up the same two gradients.

    Without clipping, as the order in which its norm is added up depends on the sharding.
    """
    train = {"steps": steps, "global_batch_size": samples, "micro_batch_size": 1}
    return workspace.small(
        distributed=strategy,
        train={**train, "max_grad_norm": None},
        scheduler="constant",
        optimizer=MUON,
        **changes,
    )


def assert_same_losses(actual: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Up to the last bit, as what is logged is added up by each rank first."""
    of_expected = [m["loss"] for m in expected]
    assert [m["loss"] for m in actual] == pytest.approx(of_expected, rel=1e-6)


def assert_same_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(actual[n], expected[n])] == []


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Where products or sums are computed in another order."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, msg=name)


def test_strategies_train_bit_for_bit_alike(workspace):
    runs = {"one": ("none", 1), "ddp": ("ddp", 2), "fsdp2": ("fsdp2", 2)}
    metrics = {
        name: workspace.train(job(workspace, strategy), ranks, directory=name)
        for name, (strategy, ranks) in runs.items()
    }
    expected = workspace.saved_tensors("one")
    momenta = [t for n, t in expected.items() if n.endswith("momentum_buffer")]
    assert len(momenta) == 2 * 7
    assert all(t.any() for t in momenta)
    for name in ("ddp", "fsdp2"):
        assert_same_losses(metrics[name], metrics["one"])
        assert_same_bits(workspace.saved_tensors(name), expected)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", HYBRID], ids=["ddp", "fsdp2", "hybrid"])
def test_four_ranks_train_as_one_within_the_order_of_sums(workspace, strategy):
    one = workspace.train(job(workspace, "none", samples=4), directory="one")
    four = workspace.train(job(workspace, strategy, samples=4), 4, directory="four")
    assert_same_losses(four, one)
    assert_close(workspace.saved_tensors("four"), workspace.saved_tensors("one"))


def test_a_run_goes_on_under_another_strategy_bit_for_bit(workspace):
    workspace.train(job(workspace, "fsdp2", 6), 2, directory="whole")
    for steps, strategy, ranks in ((2, "none", 1), (4, "fsdp2", 2), (6, "ddp", 2)):
        options = ["--resume"] if steps > 2 else []
        metrics = workspace.train(job(workspace, strategy, steps), ranks, *options)
    assert_same_losses(metrics, workspace.metrics("whole"))
    assert_same_bits(workspace.saved_tensors(), workspace.saved_tensors("whole"))


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("ddp", 2), ("fsdp2", 2), (HYBRID, 4), ({"name": "fsdp2", "cpu_offload": True}, 2)],
    ids=["ddp", "fsdp2", "hybrid", "offload"],
)
def test_the_fake_device_and_its_collectives_compute_what_the_cpu_does(workspace, strategy, ranks):
    fake = {"name": "fake", "devices": ranks}
    small = job(workspace, strategy, samples=ranks)
    on_cpu = workspace.train(small, ranks, directory="cpu")
    on_fake = workspace.train(small | {"device": fake}, ranks, directory="fake")
    assert_same_losses(on_fake, on_cpu)
    assert_close(workspace.saved_tensors("fake"), workspace.saved_tensors("cpu"))


def test_rules_decide_and_what_is_skipped_stays_through_a_resume(workspace):
    rules = [
        {"match": r"layers\.0\.mlp", "to": "adamw"},
        {"match": r"layers\.1\.mlp", "to": "skip"},
    ]

    def ruled(strategy: str, steps: int) -> Any:
        return job(workspace, strategy, steps) | {"optimizer": MUON | {"rules": rules}}

    workspace.train(ruled("fsdp2", 4), 2, directory="whole")
    workspace.train(ruled("none", 1))
    first = workspace.saved_tensors()
    workspace.train(ruled("fsdp2", 4), 2, "--resume")
    last = workspace.saved_tensors()
    assert_same_bits(last, workspace.saved_tensors("whole"))
    moved = {name for name in first if not torch.equal(first[name], last[name])}
    for projection in ("gate_proj", "up_proj", "down_proj"):
        of_adamw, skipped = (f"model.layers.{i}.mlp.{projection}.weight" for i in (0, 1))
        assert f"optimizer.{of_adamw}.exp_avg" in moved
        assert not [name for name in first if name.startswith(f"optimizer.{skipped}")]
        assert f"model.{skipped}" not in moved
        assert f"model.{of_adamw}" in moved

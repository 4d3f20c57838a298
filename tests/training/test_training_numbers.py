"""The numbers of a run: the same for every strategy, number of ranks and split."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from core_plugin import tensors
from core_plugin.training.assembly import build, build_model
from core_plugin.training.loop import Stepper
from core_plugin.training.materialize import Materializer
from core_plugin.training.world import join

SETTINGS = {"steps": 2, "global_batch_size": 5, "micro_batch_size": 2, "max_grad_norm": None}
DOCUMENT = {
    "model": {"name": "recording", "hidden_size": 16, "layers": 2, "heads": 2},
    "data": {"name": "jsonl", "path": "data.jsonl", "vocabulary_size": 300},
    "optimizer": "recording",
    "scheduler": "constant",
    "device": {"name": "cpu", "threads": 1},
    "hooks": ["jsonl"],
    "train": SETTINGS,
}


@pytest.fixture
def documents(workspace):
    """A file of samples whose completions differ in length, so that means of means are wrong."""
    lines = [
        {"prompt": f"count to {n}: ", "completion": " ".join(map(str, range(n)))}
        for n in (1, 30, 2, 17, 3, 60, 5)
    ]
    (workspace.path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return workspace


def reference_gradients(workspace) -> list[dict[str, torch.Tensor]]:
    """Each step's gradients by plain PyTorch in float64: one process, the whole global batch."""
    run = workspace.resolve(DOCUMENT)
    data = run["data"]
    tokenizer = data.implementation.tokenizer(data.params)
    samples = data.implementation.load(data.params, tokenizer)
    model = build_model(run, tokenizer.get_vocab_size())
    architecture = run["model"].implementation
    Materializer(model, torch.device("cpu"), 0, architecture.initialize, str)(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    recorded = []
    for indices in workspace.sample_indices(len(samples), SETTINGS):
        losses = []
        for index in indices:
            sample = samples[index]
            logits = model(sample["input_ids"][None])[0]
            kept = sample["labels"] != -100
            losses.append(F.cross_entropy(logits[kept], sample["labels"][kept], reduction="none"))
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()
        recorded.append({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    return recorded


@pytest.mark.parametrize(
    ("strategy", "ranks", "micro_batch_size"),
    [("none", 1, 2), ("ddp", 2, 1), ("ddp", 3, 2), ("fsdp2", 2, 2), ("fsdp2", 3, 1)],
)
def test_gradients_are_those_of_one_process_on_the_whole_batch(
    documents, strategy, ranks, micro_batch_size
):
    train = {**SETTINGS, "micro_batch_size": micro_batch_size}
    documents.train({**DOCUMENT, "distributed": strategy, "train": train}, ranks)
    for step, expected in enumerate(reference_gradients(documents)):
        actual = torch.load(documents.path / f"grads-{step}.pt")
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_gradients_are_exchanged_once_a_step_whatever_the_micro_batches(workspace, strategy):
    def reductions(micro_batch_size: int) -> int:
        settings = {"steps": 3, "global_batch_size": 8, "micro_batch_size": micro_batch_size}
        document = workspace.small(distributed=strategy, train=settings, hooks=["collectives"])
        workspace.train(document, 2, directory=f"micro-{micro_batch_size}")
        counts = json.loads((workspace.path / "collectives-0.json").read_text())
        return sum(n for op, n in counts.items() if "reduce" in op)

    assert reductions(1) == reductions(4)


def test_the_loop_adds_one_collective_a_step(workspace):
    settings = {"steps": 4, "global_batch_size": 4, "micro_batch_size": 1, "log_every": 4}
    document = workspace.small(
        distributed="ddp", train={**settings, "max_grad_norm": None}, hooks=["collectives"]
    )
    workspace.train(document, 2)
    counts = json.loads((workspace.path / "collectives-0.json").read_text())
    buckets = 1
    assert counts["c10d::allreduce_"] <= 4 * (buckets + 1) + 1  # one more in DDP's first step


def test_losses_are_equal_for_every_strategy_and_number_of_ranks(workspace):
    runs = {
        of: workspace.train(workspace.small(distributed=of[0]), of[1], directory=f"{of[0]}-{of[1]}")
        for of in [("none", 1), ("ddp", 2), ("fsdp2", 2), ("fsdp2", 3)]
    }
    expected = [m["loss"] for m in runs["none", 1]]
    for metrics in runs.values():
        assert [m["loss"] for m in metrics] == pytest.approx(expected, rel=1e-5)


def test_bf16_computes_in_bf16_and_keeps_float32_parameters(workspace):
    fp32 = workspace.train(workspace.small(), 1)
    settings = {"steps": 4, "global_batch_size": 4, "micro_batch_size": 2, "precision": "bf16"}
    for strategy, ranks in [("none", 1), ("ddp", 2), ("fsdp2", 2)]:
        document = workspace.small(distributed=strategy, train=settings)
        losses = [m["loss"] for m in workspace.train(document, ranks, directory=strategy)]
        assert losses != [m["loss"] for m in fp32]
        assert losses == pytest.approx([m["loss"] for m in fp32], rel=2e-2)
        dtypes = {t.dtype for t in workspace.saved_tensors(strategy).values() if t.ndim}
        assert dtypes == {torch.float32}


def test_muon_is_the_same_on_one_process_and_sharded(workspace):
    document = workspace.small(optimizer={"name": "muon", "lr": 3e-3})
    expected = [m["loss"] for m in workspace.train(document, 1)]
    for strategy in ("ddp", "fsdp2"):
        metrics = workspace.train({**document, "distributed": strategy}, 2, directory=strategy)
        assert [m["loss"] for m in metrics] == pytest.approx(expected, rel=1e-5)


def test_lora_is_the_same_on_one_process_and_sharded(workspace):
    document = workspace.small(peft={"name": "lora", "r": 4})
    expected = [m["loss"] for m in workspace.train(document, 1)]
    assert expected[-1] != expected[0]
    for strategy in ("ddp", "fsdp2"):
        metrics = workspace.train({**document, "distributed": strategy}, 2, directory=strategy)
        assert [m["loss"] for m in metrics] == pytest.approx(expected, rel=1e-5)


def test_the_initial_values_do_not_depend_on_the_division(workspace):
    run = workspace.resolve(workspace.small())
    model = run["model"]

    def values(order) -> dict[str, torch.Tensor]:
        built = build_model(run, 300)
        make = Materializer(built, torch.device("cpu"), 0, model.implementation.initialize, str)
        for part in order(built):
            make(part)
        return tensors.model_tensors(built)

    whole = values(lambda m: [m])
    by_parts = values(lambda m: [*reversed(model.implementation.blocks(m)), m])
    assert whole.keys() == by_parts.keys()
    assert all(torch.equal(whole[n], by_parts[n]) for n in whole)


def test_nothing_is_read_after_the_last_step(workspace, monkeypatch):
    """A sample that cannot be read is no fault of a run that ends before it."""
    config = workspace.resolve(workspace.small(hooks=[]))
    with join(None) as world:
        world.start("gloo")
        training = build(config, torch.device("cpu"), world)
        read, step = [], training.batches.step
        monkeypatch.setattr(training.batches, "step", lambda n: read.append(n) or step(n))
        idle = SimpleNamespace(signal=None), SimpleNamespace(ended=0)
        stepper = Stepper(training, *idle)
        while training.step < config.train.steps:
            assert stepper.step()
        Stepper(training, *idle)
    assert read == [0, 1, 2, 3]

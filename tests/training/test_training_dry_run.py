"""What each rank would hold, told by one process without memory, devices or other processes."""

from __future__ import annotations

import json
import math
import re
import resource

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from core_plugin.cli import app
from core_plugin.errors import ConfigError
from core_plugin.training.assembly import build_model
from core_plugin.training.dry_run import dry_run
from core_plugin.types import OptimizerPlugin

SIZES = {"hidden_size": 24, "layers": 3, "heads": 2, "intermediate_size": 40}
"""No number of rows is a multiple of 7."""


def small(workspace, **changes):
    return workspace.resolve(workspace.small(model={"name": "decoder", **SIZES}, **changes))


def rows_on(rank: int, rows: int, ranks: int) -> int:
    """What torch.chunk leaves for a rank."""
    chunk = math.ceil(rows / ranks)
    return max(0, min(chunk, rows - rank * chunk))


def held(model, rank: int, ranks: int, trained: bool = False) -> int:
    """The bytes of a rank's rows of all parameters, or of those that are trained."""
    parameters = [p for p in model.parameters() if p.requires_grad or not trained]
    return sum(4 * rows_on(rank, len(p), ranks) * p[0].numel() for p in parameters)


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (7, 1), (64, 1), (14, 2)])
def test_the_shards_of_the_first_and_the_last_rank_are_measured(workspace, ranks, replicas):
    run = small(workspace, distributed={"name": "fsdp2", "replicas": replicas})
    result = dry_run(run, ranks)
    assert list(result.ranks) == sorted({0, ranks - 1})
    parts = ranks // replicas
    for rank, kept in result.ranks.items():
        expected = held(result.model, rank % parts, parts)
        assert kept.parameters == kept.gradients == expected
        steps = 4 * len(list(result.model.parameters()))  # AdamW's counters
        assert kept.optimizer == 2 * expected + steps
    assert result.blocks == {"Layer": 3}
    assert result.fault is None
    assert not dist.is_initialized()
    if replicas == 1:
        first = result.ranks[0]
        assert result.planned.parameters == first.parameters
        assert result.planned.gradients == first.gradients


def test_a_strategy_that_wraps_and_one_without_ranks_hold_all(workspace):
    for strategy, ranks in (("ddp", 5), ("none", 1)):
        result = dry_run(small(workspace, distributed=strategy), ranks)
        total = 4 * sum(p.numel() for p in result.model.parameters())
        assert {kept.parameters for kept in result.ranks.values()} == {total}
        assert result.planned.total == 4 * total


@pytest.mark.parametrize("compression", ["fp16", "bf16", "powersgd"])
def test_compressed_gradients_are_not_tried_out(workspace, compression):
    ddp = {"name": "ddp", "compression": compression}
    if compression == "powersgd":
        ddp["powersgd"] = {"start_step": 2}
    result = dry_run(small(workspace, distributed=ddp), 5)
    total = 4 * sum(p.numel() for p in result.model.parameters())
    assert {kept.parameters for kept in result.ranks.values()} == {total}


def test_of_a_frozen_model_gradients_are_of_the_adapter_alone(workspace):
    result = dry_run(small(workspace, distributed="fsdp2", peft={"name": "lora", "r": 4}), 7)
    kept = result.ranks[0]
    assert kept.parameters == held(result.model, 0, 7)
    assert kept.gradients == held(result.model, 0, 7, trained=True) < kept.parameters / 4
    assert 2 * kept.gradients < kept.optimizer < 3 * kept.gradients


def test_an_optimizer_is_measured_and_not_guessed(workspace):
    muon = dry_run(small(workspace, distributed="fsdp2", optimizer="muon"), 3).ranks[0]
    assert muon.gradients < muon.optimizer < 1.7 * muon.gradients
    sgd = dry_run(small(workspace, distributed="fsdp2", optimizer="sgd"), 3).ranks[0]
    assert sgd.optimizer in (0, sgd.gradients)


@OptimizerPlugin("of_values").register()
def of_values(model, params):
    class OfValues(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError(f"the first is {self.param_groups[0]['params'][0].sum().item()}")

    return OfValues(model.parameters(), lr=0.1)


def test_an_optimizer_that_needs_values_is_as_planned(workspace):
    document = workspace.small(optimizer="of_values")
    result = dry_run(workspace.resolve(document), 1)
    assert result.ranks[0].optimizer == result.planned.optimizer
    assert "without values it takes no step (RuntimeError: " in invoke(workspace, document).output


@OptimizerPlugin("failing_last").register()
def failing_last(model, params):
    class FailingLast(torch.optim.SGD):
        def step(self, closure=None):
            if dist.get_rank() == dist.get_world_size() - 1:
                raise ValueError("too few rows")

    return FailingLast(model.parameters(), lr=0.1)


def test_a_fault_of_any_rank_is_told(workspace):
    run = small(workspace, distributed="fsdp2", optimizer="failing_last")
    assert dry_run(run, 7).fault == "ValueError: too few rows"


@OptimizerPlugin("telling").register()
def telling(model, params):
    class Telling(torch.optim.SGD):
        def describe_parameters(self):
            first = {"tensor": "the first", "weight": 2, "why": "it [is] so", "share": None}
            return [first, {"tensor": "the second", "weight": 1234.5678, "late": (3, 4)}]

    return Telling(model.parameters(), lr=0.1)


def test_what_an_optimizer_says_of_its_parameters_is_printed_whatever_it_is(workspace):
    document = workspace.small(optimizer="telling")
    lines = invoke(workspace, document).output.splitlines()
    place = next(n for n, line in enumerate(lines) if line.startswith("tensor"))
    assert [line.rstrip() for line in lines[place : place + 3]] == [
        "tensor      weight  why         share  late",
        "the first        2  it [is] so",
        "the second    1235                     (3, 4)",
    ]


def test_an_optimizer_that_says_nothing_of_its_parameters_has_no_table(workspace):
    document = workspace.small(optimizer="adamw")
    assert dry_run(workspace.resolve(document), 1).described == []
    lines = invoke(workspace, document).output.splitlines()
    assert lines[1].startswith("repeated blocks")
    assert lines[2].split() == ["parameters", "gradients", "optimizer", "total"]


@pytest.mark.parametrize("replicas", [1, 8])
def test_muon_tells_who_orthogonalizes_what_on_64_ranks(workspace, replicas):
    document = workspace.small(
        model={"name": "decoder", **SIZES},
        distributed={"name": "fsdp2", "replicas": replicas},
        optimizer={"name": "muon", "rules": [{"match": "layers.1.*q_proj", "to": "adamw"}]},
    )
    result = dry_run(workspace.resolve(document), 64)
    shapes = {name: tuple(p.shape) for name, p in result.model.named_parameters()}
    assert {row["parameter"]: row["shape"] for row in result.described} == shapes
    of_muon = [row for row in result.described if row["optimizer"] == "muon"]
    owners = [int(row["owner"]) for row in of_muon]
    assert len(of_muon) == 3 * 7 - 1
    assert max(map(owners.count, owners)) <= -(-len(of_muon) * replicas // 64)
    assert max(owners) < 64 // replicas
    assert {row["reason"] for row in result.described if row["optimizer"] == "adamw"} == {
        "embedding",
        "output head",
        "1-dimensional",
        "rule 'layers.1.*q_proj'",
    }
    lines = invoke(workspace, document, "--world-size", "64").output.splitlines()
    last = of_muon[-1]
    scale = 0.2 * math.sqrt(40)
    cells = ["hidden", "matrix", f"{scale:.4g}", "0.003", "0.1", last["owner"], "auto"]
    wanted = ["model.layers.2.mlp.down_proj.weight", "(24,", "40)", "muon", *cells]
    assert [*wanted, f"{last['GFLOP']:.4g}"] in [line.split() for line in lines]
    work = 5 * (4 * 24 * 24 * 40 + 2 * 24**3)  # five times Gram matrix, polynomial and product
    assert 0.5 * work < last["GFLOP"] * 1e9 < 3 * work  # small matrices are filled up


def test_a_rule_that_fits_no_parameter_is_told_with_its_place(workspace):
    rules = [{"match": "q_porj", "to": "skip"}]
    document = workspace.small(optimizer={"name": "muon", "rules": rules})
    failed = invoke(workspace, document)
    assert isinstance(failed.exception, ConfigError)
    assert re.search(
        r"run\.yaml:\d+: optimizer: the rule 'q_porj' matches no parameter; did you mean .*q_proj",
        str(failed.exception),
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_billions_of_parameters_on_64_ranks_take_no_memory(workspace, optimizer):
    sizes = {"hidden_size": 4096, "layers": 29, "heads": 32, "intermediate_size": 11008}
    model = {"name": "decoder", **sizes}
    document = workspace.small(model=model, distributed="fsdp2", optimizer=optimizer)
    run = workspace.resolve(document)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = dry_run(run, 64)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    total = sum(p.numel() for p in result.model.parameters())
    assert total > 5.8e9
    assert 4 * total / 64 <= result.ranks[0].parameters < 1.01 * 4 * total / 64
    assert grown < 300_000, f"{grown} kB"


def invoke(workspace, document, *options):
    file = workspace.path / "run.yaml"
    file.write_text(json.dumps(document, indent=1))
    return CliRunner().invoke(app, ["train", str(file), "--dry-run", *options])


def test_the_command_prints_blocks_adapters_and_bytes(workspace):
    document = workspace.small(distributed="fsdp2", peft={"name": "lora", "r": 4})
    document["launcher"] = {"name": "torchrun", "processes_per_host": 3}
    printed = invoke(workspace, document)
    assert printed.exit_code == 0, printed.output
    for expected in ("q_proj", "r=4", "repeated blocks: 2 Layer", "rank 0 of 3", "rank 2 of 3"):
        assert expected in printed.output
    assert "rank 63 of 64" in invoke(workspace, document, "--world-size", "64").output
    assert not list(workspace.path.glob("runs"))


@pytest.mark.parametrize(
    ("override", "ranks", "message"),
    [
        ("distributed.replicas=3", 64, r"distributed\.replicas: is 3, but 64 ranks cannot"),
        ("distributed=none", 64, r"distributed: the strategy 'none' is for one process"),
        ("distributed=fsdp2", 0, "--world-size must be at least 1, got 0"),
        ("train.blocks=[Lair]", 2, r"train\.blocks: .*CausalLM is a Lair; did you mean Layer"),
        ("train.blocks=[]", 2, "names no blocks|no blocks"),
        ("train.compile=aot_egger", 2, r"train\.compile: .*did you mean aot_eager"),
    ],
)
def test_what_does_not_fit_is_told_with_its_place(workspace, override, ranks, message):
    document = workspace.small(distributed={"name": "fsdp2"})
    failed = invoke(workspace, document, "--world-size", str(ranks), override)
    assert isinstance(failed.exception, ConfigError)
    assert re.search(message, str(failed.exception))
    assert not dist.is_initialized()


def test_what_is_in_the_file_is_told_with_its_line(workspace):
    document = workspace.small(distributed={"name": "fsdp2", "replicas": 3})
    failed = invoke(workspace, document, "--world-size", "64")
    lines = (workspace.path / "run.yaml").read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "replicas" in text)
    assert f"run.yaml:{line}: distributed.replicas: is 3" in str(failed.exception)


def test_a_number_of_ranks_goes_with_a_dry_run_alone(workspace):
    failed = CliRunner().invoke(app, ["train", "run.yaml", "--world-size", "2"])
    assert failed.exit_code == 2
    assert "it goes with --dry-run" in failed.output


def test_a_model_is_described_before_it_is_sharded(workspace):
    run = small(workspace, distributed="fsdp2")
    result = dry_run(run, 7)
    wanted = build_model(run, result.model.lm_head.weight.shape[0])
    assert [(n, p.shape) for n, p in result.model.named_parameters()] == [
        (n, p.shape) for n, p in wanted.named_parameters()
    ]
    assert all(p.is_meta for p in result.model.parameters())

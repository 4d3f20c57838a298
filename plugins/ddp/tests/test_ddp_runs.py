"""Whole runs with DDP: uneven inputs, and how runs end whose ranks do not fit together."""

import json
import socket

import pytest
import torch

RUN = {
    "model": {"name": "decoder", "hidden_size": 16, "layers": 2, "heads": 2},
    "data": {
        "name": "text",
        "path": "corpus.txt",
        "sequence_length": 16,
        "vocabulary_size": 300,
    },
    "optimizer": {"name": "adamw", "lr": 1e-2},
    "scheduler": "constant",
    "device": {"name": "cpu", "threads": 1},
    "hooks": ["jsonl"],
    "distributed": "ddp",
    "train": {"steps": 4, "global_batch_size": 4, "micro_batch_size": 1},
}


@pytest.fixture
def run(ddp_processes, tmp_path):
    """A function that runs a document and gives its metrics, exit codes and messages."""

    def on_ranks(name, ranks, **changes):
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        words = " ".join(f"{n} bottles of beer on the wall" for n in range(200))
        (directory / "corpus.txt").write_text(words)
        checkpoint = {"directory": "run"} | changes.pop("checkpoint", {})
        (directory / "run.json").write_text(json.dumps(RUN | {"checkpoint": checkpoint} | changes))
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        ddp_processes.run("ddp_runs:train", ranks, directory, port)
        codes = [int((directory / f"exit-{rank}").read_text()) for rank in range(ranks)]
        errors = [(directory / f"errors-{rank}").read_text() for rank in range(ranks)]
        file = directory / "run" / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines], codes, errors

    return on_ranks


def numbers(metrics):
    return [[m["loss"], m["grad_norm"], m["tokens"]] for m in metrics]


def weights(directory):
    import torch.distributed.checkpoint as dcp

    path = max((directory / "run" / "checkpoints").glob("step-*")) / "state"
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in metadata.items()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "what"),
    [(4, 1, "a rank without any"), (5, 2, "a rank with fewer, in micro-batches of two sizes")],
)
def test_inputs_that_ranks_cannot_share_equally(run, global_batch_size, micro_batch_size, what):
    train = {**RUN["train"], "global_batch_size": global_batch_size}
    alone, codes, errors = run("alone", 1, train=train)
    assert codes == [0], errors
    train["micro_batch_size"] = micro_batch_size
    shared, codes, errors = run("shared", 3, train=train)
    assert codes == [0, 0, 0], errors
    for one, three in zip(numbers(alone), numbers(shared), strict=True):
        assert three == pytest.approx(one, rel=1e-5), what


def test_a_run_with_powersgd_goes_on_bit_by_bit(run, tmp_path):
    power_sgd = {"name": "ddp", "compression": "powersgd", "powersgd": {"start_step": 2}}
    train = {**RUN["train"], "steps": 6}
    model = {**RUN["model"], "hidden_size": 32}
    settings = {"model": model, "distributed": power_sgd}
    whole, codes, errors = run("whole", 2, train=train, **settings)
    assert codes == [0, 0], errors
    exact, codes, errors = run("exact", 2, train=train, model=model)
    assert codes == [0, 0], errors
    assert numbers(whole)[:2] == numbers(exact)[:2]
    assert numbers(whole)[3] != numbers(exact)[3]
    for steps in (4, 6):
        parts, codes, errors = run(
            "parts",
            2,
            train={**train, "steps": steps},
            checkpoint={"resume": "auto", "allow_changes": True},
            **settings,
        )
        assert codes == [0, 0], errors
    assert numbers(parts) == numbers(whole)
    expected = weights(tmp_path / "whole")
    assert all(torch.equal(t, expected[n]) for n, t in weights(tmp_path / "parts").items())


def test_batch_norm_goes_on_bit_by_bit(run, tmp_path):
    train = {**RUN["train"], "global_batch_size": 8, "micro_batch_size": 2, "steps": 4}
    model = {**RUN["model"], "name": "ddp_normed"}
    whole, codes, errors = run("whole", 2, train=train, model=model)
    assert codes == [0, 0], errors
    for steps in (2, 4):
        resumed = {"resume": "auto"}
        parts, codes, errors = run(
            "parts", 2, train={**train, "steps": steps}, model=model, checkpoint=resumed
        )
        assert codes == [0, 0], errors
    assert numbers(parts) == numbers(whole)
    expected = weights(tmp_path / "whole")
    assert expected["model.norm.num_batches_tracked"] == 8
    assert all(torch.equal(t, expected[n]) for n, t in weights(tmp_path / "parts").items())


@pytest.mark.parametrize("ranks_that_lack_it", [[1], [0, 1]])
def test_a_parameter_that_a_rank_does_not_use_ends_all(run, ranks_that_lack_it):
    metrics, codes, errors = run(
        "run",
        2,
        model={**RUN["model"], "name": "ddp_normed"},
        environment={rank: {"USES_LESS": "1"} for rank in ranks_that_lack_it},
    )
    assert metrics == []
    assert codes == [1, 1]
    for rank in (0, 1):
        assert "Traceback" not in errors[rank]
        if rank in ranks_that_lack_it:
            assert f"rank {rank}: these parameters are trained" in errors[rank]
            assert "\n  sometimes.weight\n  sometimes.bias\n" in errors[rank]
        else:
            assert f"rank {rank} lost contact with another rank" in errors[rank]


def test_unused_parameters_are_trained_around_if_asked_to(run):
    metrics, codes, errors = run(
        "run",
        2,
        model={**RUN["model"], "name": "ddp_normed"},
        distributed={"name": "ddp", "find_unused_parameters": True},
        environment={1: {"USES_LESS": "1"}},
    )
    assert codes == [0, 0], errors
    assert len(metrics) == 4


def test_models_that_differ_are_told_before_the_run(run):
    metrics, codes, errors = run(
        "run",
        2,
        model={**RUN["model"], "name": "ddp_normed"},
        environment={1: {"HAS_MORE": "1"}},
    )
    assert metrics == []
    assert codes == [1, 1]
    assert "Traceback" not in "".join(errors)
    # Whichever comes first tells it for both.
    assert sorted("more.weight: (not there) (rank 0); float32 [1, 1]" in e for e in errors) == [
        False,
        True,
    ]

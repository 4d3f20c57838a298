"""Runs whose blocks are recomputed and compiled: the same numbers, names and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from core_plugin.training.dry_run import dry_run
from core_plugin.training.export import export
from core_plugin.training.placement import size


def losses(metrics):
    return [m["loss"] for m in metrics]


def test_plain_recomputed_and_compiled_runs_continue_each_other(workspace, tmp_path: Path):
    model = {"name": "decoder", "hidden_size": 16, "layers": 3, "heads": 2, "tie_embeddings": True}
    plain = workspace.small(model=model, scheduler="constant", peft={"name": "lora", "r": 2})
    undisturbed = workspace.train(plain, directory="plain")

    def continued(ranks: int, strategy: str, steps: int, **train: object) -> str:
        train = plain["train"] | train | {"steps": steps}
        document = plain | {"distributed": strategy, "train": train}
        file = workspace.write(document, ranks, "run")
        code, output = workspace.run(["train", str(file), "--resume"])
        assert code == 0, output
        return output

    output = continued(2, "fsdp2", 2, activation_checkpointing="selective", compile="aot_eager")
    foretold = dry_run(workspace.resolve(plain | {"distributed": "fsdp2"}), 2).ranks[0]
    assert f"trained ones), {size(foretold.parameters)}\n" in output
    continued(2, "ddp", 3, activation_checkpointing=2)
    continued(1, "none", 4, activation_checkpointing="full")
    assert losses(workspace.metrics()) == pytest.approx(losses(undisturbed), rel=1e-5)

    saved, wanted = workspace.saved_tensors(), workspace.saved_tensors("plain")
    assert saved.keys() == wanted.keys()
    export(workspace.path / "run", tmp_path / "exported", merge=True)
    assert list((tmp_path / "exported").glob("*.safetensors"))

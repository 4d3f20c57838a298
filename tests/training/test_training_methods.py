"""PEFT methods of packages that core knows nothing of, in runs from YAML."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from core_plugin.types import PeftPlugin

LAYERS = [f"base_model.model.model.layers.{i}" for i in range(2)]
SCALED = ("self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
IA3 = {
    "name": "ia3",
    "target_modules": ["k_proj", "v_proj", "down_proj"],
    "feedforward_modules": ["down_proj"],
}
PROMPT_TUNING = {"name": "prompt_tuning", "num_virtual_tokens": 3}


def job(workspace, peft, **changes):
    document = workspace.small(peft=peft, optimizer={"name": "adamw", "lr": 0.05}, **changes)
    return document | {"checkpoint": {"every": 2, "keep": 2}}


def losses(metrics):
    return [row["loss"] for row in metrics]


@pytest.mark.parametrize(
    ("peft", "keys"),
    [
        (IA3, {f"{layer}.{name}.ia3_l" for layer in LAYERS for name in SCALED}),
        (PROMPT_TUNING, {"prompt_embeddings"}),
    ],
    ids=["ia3", "prompt_tuning"],
)
def test_a_method_trains_and_goes_on_under_every_strategy(workspace, peft, keys):
    document = job(workspace, peft)
    expected = losses(workspace.train(document, directory="none"))
    assert min(expected[1:]) < expected[0]
    for strategy in ("ddp", "fsdp2"):
        run = {**document, "distributed": strategy}
        found = losses(workspace.train(run, 2, directory=strategy))
        assert found == pytest.approx(expected, rel=1e-4)
        tensors = workspace.saved_tensors(strategy)
        shutil.rmtree(workspace.checkpoints(strategy)[-1])
        assert losses(workspace.train(run, 2, "--resume", directory=strategy)) == found
        again = workspace.saved_tensors(strategy)
        assert [
            name for name, tensor in tensors.items() if not torch.equal(tensor, again[name])
        ] == []
        assert_adapter(workspace, run, workspace.checkpoints(strategy)[-1] / "adapter", keys)


def assert_adapter(workspace, document, directory, keys):
    """The files are the adapter's, and make it again in a model that has none."""
    assert load_file(directory / "adapter_model.safetensors").keys() == keys
    run = workspace.resolve(document)
    written = json.loads((directory / "adapter_config.json").read_text())
    assert written["peft_type"] == run["peft"].route.name.upper()
    model = run["model"].implementation.build(run["model"].params, 300)
    assert PeftPlugin.from_pretrained(model, directory) is run["peft"].implementation


def test_virtual_tokens_begin_as_the_same_tokens_under_every_strategy(workspace):
    """They depend on the values of the model, which is on meta when the adapter is put in."""
    document = job(
        workspace,
        PROMPT_TUNING | {"prompt_tuning_init": "SAMPLE_VOCAB"},
        train={"steps": 1, "global_batch_size": 4},
    )
    found = []
    for strategy, ranks in (("none", 1), ("fsdp2", 2)):
        run = document | {"distributed": strategy, "optimizer": {"name": "sgd", "lr": 1e-9}}
        workspace.train(run, ranks, directory=strategy)
        adapter = workspace.checkpoints(strategy)[-1] / "adapter"
        found.append(load_file(adapter / "adapter_model.safetensors")["prompt_embeddings"])
    torch.testing.assert_close(found[1], found[0])
    assert 0.01 < found[0].std() < 0.03  # of the decoder's embeddings it is 0.02

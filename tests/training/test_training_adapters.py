"""Runs that train an adapter: every kind of it, spread over ranks, gone on with, and handed on."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

LORA = {"name": "lora", "r": 2}
EVERYTHING = {
    **LORA,
    "target_modules": ["q_proj", "down_proj", "embed_tokens"],
    "exclude_modules": ["layers.1.mlp.down_proj"],
    "rank_pattern": {"layers.1.self_attn.q_proj": 4},
    "modules_to_save": ["norm"],
    "use_rslora": True,
}
KINDS = {
    "patterns and a saved module": EVERYTHING,
    "dora": {**LORA, "use_dora": True},
    "pissa": {**LORA, "init_lora_weights": "pissa"},
    "eva": {**LORA, "init_lora_weights": "eva"},
    "token rows": {**LORA, "trainable_token_indices": [5, 7, 20]},
}


def job(workspace, strategy="none", **changes):
    train = {"steps": 4, "global_batch_size": 4, "micro_batch_size": 2}
    return workspace.small(distributed=strategy, train=train, **changes)


def adapter_of(workspace, directory="run"):
    return workspace.checkpoints(directory)[-1] / "adapter"


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *((kind, "fsdp2") for kind in KINDS),
        ("patterns and a saved module", "ddp"),
        ("token rows", "ddp"),
    ],
)
def test_ranks_train_what_one_process_does(workspace, kind, strategy):
    alone = workspace.train(job(workspace, peft=KINDS[kind]), directory="alone")
    spread = workspace.train(job(workspace, strategy, peft=KINDS[kind]), 2)
    for metric in ("loss", "grad_norm"):
        torch.testing.assert_close(
            [m[metric] for m in spread], [m[metric] for m in alone], rtol=2e-5, atol=1e-6
        )
    expected = load_file(adapter_of(workspace, "alone") / "adapter_model.safetensors")
    actual = load_file(adapter_of(workspace) / "adapter_model.safetensors")
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("kind", ["dora", "pissa", "eva"])
def test_what_depends_on_the_base_goes_on_on_other_ranks(workspace, kind):
    document = job(workspace, "fsdp2", peft=KINDS[kind], scheduler="constant")
    expected = workspace.train(document, 2, directory="undisturbed")
    document["train"]["steps"] = 2
    workspace.train(document, 2)
    document["train"]["steps"] = 4
    resumed = workspace.train(document | {"distributed": "none"}, 1, "--resume")
    torch.testing.assert_close(
        [m["loss"] for m in resumed], [m["loss"] for m in expected], rtol=1e-5, atol=0
    )


@pytest.mark.parametrize(("strategy", "kind"), [("none", "eva"), ("fsdp2", "dora")])
def test_a_run_starts_from_an_adapter_that_another_one_left(workspace, strategy, kind):
    ranks = 1 if strategy == "none" else 2
    workspace.train(job(workspace, peft=KINDS[kind]), directory="first")
    start = str(adapter_of(workspace, "first"))
    document = job(workspace, strategy, peft={**KINDS[kind], "weights": start})
    document["optimizer"] = {"name": "sgd", "lr": 1e-30}
    first = workspace.metrics("first")
    second = workspace.train(document, ranks)
    assert second[0]["loss"] < first[0]["loss"]
    before = load_file(f"{start}/adapter_model.safetensors")
    after = load_file(adapter_of(workspace) / "adapter_model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_an_adapter_that_does_not_fit_ends_the_run_with_all_that_is_wrong(workspace):
    workspace.train(job(workspace, peft=LORA), directory="first")
    start = str(adapter_of(workspace, "first"))
    document = job(workspace, peft={**LORA, "r": 4, "weights": start})
    code, output = workspace.run(["train", str(workspace.write(document, 1, "run"))])
    assert code == 1
    assert "run.yaml:1: peft.weights: " in output
    assert "r: 2 in adapter_config.json, 4 in the model" in output
    assert "Traceback" not in output


def test_a_dry_run_shows_what_each_module_gets(workspace):
    file = workspace.write(job(workspace, peft=EVERYTHING), 1, "run")
    code, output = workspace.run(["train", str(file), "--dry-run"])
    assert code == 0, output
    rows = {line.split()[0]: line.split()[1:] for line in output.splitlines()}
    assert rows["model.layers.0.self_attn.q_proj"][1:] == ["r=2", "lora_alpha=16", "64"]
    assert rows["model.layers.1.self_attn.q_proj"][1:] == ["r=4", "lora_alpha=16", "128"]
    assert rows["model.norm"] == ["RMSNorm", "16"]
    assert "model.layers.1.mlp.down_proj" not in rows
    assert not (workspace.path / "run").exists()


def test_a_dry_run_tells_every_fault_of_the_rules(workspace):
    peft = {**LORA, "target_modules": ["q_prj", "norm"], "modules_to_save": ["lm_hed"]}
    file = workspace.write(job(workspace, peft=peft), 1, "run")
    code, output = workspace.run(["train", str(file), "--dry-run"])
    assert code == 2
    for part in ("did you mean q_proj", "has no layer for RMSNorm", "did you mean lm_head"):
        assert part in output
    assert "run.yaml:1: peft.target_modules: no module is called 'q_prj'" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("peft", "told"),
    [
        ({**LORA, "weights": "nowhere"}, "peft.weights: nowhere"),
        ({"name": "ia3", "weights": "lora"}, "peft.weights: lora holds an adapter of lora, and"),
    ],
)
def test_a_dry_run_looks_at_what_the_adapter_starts_from(workspace, peft, told):
    (workspace.path / "lora").mkdir()
    (workspace.path / "lora" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    file = workspace.write(job(workspace, peft=peft), 1, "run")
    code, output = workspace.run(["train", str(file), "--dry-run"])
    assert code != 0
    assert told in output
    assert "run.yaml:1" in output


def test_settings_of_an_adapter_are_in_its_file(workspace):
    workspace.train(job(workspace, peft=EVERYTHING))
    config = json.loads((adapter_of(workspace) / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {"layers.1.self_attn.q_proj": 4}
    assert config["modules_to_save"] == ["model.norm"]
    assert config["target_modules"] == ["down_proj", "embed_tokens", "q_proj"]

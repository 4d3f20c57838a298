"""Exporting checkpoints of real runs, and reading what was written."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from exports import MODEL, checkpoints, command, logits, names, saved_tensors, sign, train
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from core_plugin import config, document
from core_plugin.adapters import inject, load_adapter
from core_plugin.builtin.decoder import Decoder
from core_plugin.builtin.decoder_model import CausalLM
from core_plugin.errors import ConfigError
from core_plugin.training.assembly import build_model, shard_model
from core_plugin.training.checkpoint import verify
from core_plugin.training.export import export
from core_plugin.training.world import join
from core_plugin_lora.plugin import LoRA, LoRAParams

PARAMS = Decoder.Params(hidden_size=16, layers=2, heads=2)
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json"]
LORA = {"r": 2, "lora_alpha": 64, "target_modules": ["q_proj", "up_proj", "lm_head"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a whole model with a tied head, of an adapter for given weights, and of both."""
    path = tmp_path_factory.mktemp("runs")
    (path / "corpus.txt").write_text(" ".join((Path(__file__).read_text() * 2).split()))
    base().save_to(path / "base.safetensors")
    tied = {**MODEL, "tie_embeddings": True}
    train(path, "whole", 2, distributed="fsdp2", model=tied)
    weights, lora = str(path / "base.safetensors"), {"name": "lora", **LORA}
    train(path, "adapter", 2, distributed="fsdp2", model={**MODEL, "weights": weights}, peft=lora)
    train(path, "tied", 1, model=tied, peft=lora)
    return path


class Base(CausalLM):
    def save_to(self, file: Path) -> None:
        save_file({n: p.detach() for n, p in self.named_parameters()}, file)


def base() -> Base:
    torch.manual_seed(5)
    return Base(PARAMS, 300)


def read_model(directory: Path, **model: object) -> torch.nn.Module:
    """What a run whose ``model.weights`` is an exported directory begins with."""
    return untrained(configuration(directory) | {"peft": None}, weights=str(directory), **model)


def untrained(run: dict[str, object], **model: object) -> torch.nn.Module:
    """What a run begins with, in one process."""
    here = {"distributed": "none", "launcher": "local", "model": {**run["model"], **model}}
    resolved = config.resolve({**run, **here})
    with join(None) as world:
        return shard_model(resolved, build_model(resolved, 300), torch.device("cpu"), world)


def adapted(model: torch.nn.Module, adapter: Path) -> torch.Tensor:
    """The logits of a model with the adapter of a run beside it."""
    inject(model, LoRA, LoRAParams(**LORA))
    load_adapter(model, adapter)
    return logits(model)


def configuration(directory: Path) -> dict[str, object]:
    return document.read(directory / "run.yaml")[0]


def test_a_trained_model_is_written_by_the_architectures_names(runs, tmp_path):
    code, output = command(runs, "export", "whole", tmp_path / "out")
    assert code == 0, output
    files = ["config.json", "model.safetensors", "run.yaml", *TOKENIZER_FILES]
    assert output.endswith(f"step-00000004 is in {tmp_path}/out: {', '.join(files)}\n")
    assert names(tmp_path / "out") == files
    newest = checkpoints(runs / "whole")[-1]
    tensors, saved = load_file(tmp_path / "out" / "model.safetensors"), saved_tensors(newest)
    assert "lm_head.weight" not in tensors
    assert tensors.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in tensors.items())
    tokenizer = (newest / "tokenizer.json").read_bytes()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer
    written = configuration(tmp_path / "out")
    assert written == json.loads((newest / "run.json").read_text())["config"]
    assert config.resolve(written).resolved() == written


def in_transformers(directory: Path) -> torch.Tensor:
    """The logits of what ``from_pretrained`` makes of a directory, with all of its tensors."""
    model, found = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(found.values()), found
    assert type(model) is LlamaForCausalLM
    return logits(model)


def test_a_written_model_computes_the_same_in_a_run_and_in_transformers(runs, tmp_path):
    export(runs / "whole", tmp_path / "out")
    expected = CausalLM(dataclasses.replace(PARAMS, tie_embeddings=True), 300)
    saved = saved_tensors(checkpoints(runs / "whole")[-1])
    expected.load_state_dict(saved, strict=False)
    assert torch.equal(logits(read_model(tmp_path / "out")), logits(expected))
    torch.testing.assert_close(in_transformers(tmp_path / "out"), logits(expected))


def test_a_merged_model_computes_what_the_adapted_one_did(runs, tmp_path):
    code, output = command(runs, "export", "adapter", tmp_path / "merged", "--merge")
    assert code == 0, output
    merged, plain = logits(read_model(tmp_path / "merged")), logits(base())
    expected = adapted(base(), checkpoints(runs / "adapter")[-1] / "adapter")
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)
    assert (merged - plain).abs().max() > 0.1
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    torch.testing.assert_close(in_transformers(tmp_path / "merged"), merged)
    assert torch.equal(tensors["model.norm.weight"], base().model.norm.weight)


def test_without_merging_the_adapters_files_are_copied(runs, tmp_path):
    export(runs / "adapter", tmp_path / "out")
    adapter = checkpoints(runs / "adapter")[-1] / "adapter"
    assert names(tmp_path / "out") == sorted([*names(adapter), "run.yaml", *TOKENIZER_FILES])
    for file in adapter.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    expected = adapted(base(), adapter)
    assert torch.equal(adapted(base(), tmp_path / "out"), expected)


def test_folders_among_the_adapters_files_are_copied_too(runs, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(checkpoints(runs / "adapter")[-1], checkpoint)
    (checkpoint / "adapter" / "parts").mkdir()
    (checkpoint / "adapter" / "parts" / "notes.txt").write_text("of the adapter")
    sign(checkpoint)
    export(checkpoint, tmp_path / "out")
    assert (tmp_path / "out" / "parts" / "notes.txt").read_text() == "of the adapter"


def test_a_merged_head_that_was_tied_is_one_of_its_own(runs, tmp_path):
    export(runs / "tied", tmp_path / "merged", merge=True)
    newest = checkpoints(runs / "tied")[-1]
    tied = untrained(json.loads((newest / "run.json").read_text())["config"] | {"peft": None})
    embeddings = tied.model.embed_tokens.weight
    assert tied.lm_head.weight is embeddings
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(tensors["model.embed_tokens.weight"], embeddings)
    assert not torch.equal(tensors["lm_head.weight"], embeddings)
    written = configuration(tmp_path / "merged")
    assert written["model"]["tie_embeddings"] is False
    assert written["peft"]["target_modules"] == LORA["target_modules"]
    merged = logits(read_model(tmp_path / "merged"))
    expected = adapted(tied, newest / "adapter")
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)


def test_the_newest_checkpoint_of_a_run_is_meant_and_another_can_be(runs, tmp_path):
    first, last = checkpoints(runs / "whole")
    moved = shutil.copytree(first, tmp_path / "moved")
    for source, expected in [(runs / "whole", last), (first, first), (moved, first)]:
        out = tmp_path / "out"
        found = export(source, out).checkpoint
        assert found.samefile(source if source is moved else expected)
        norm = load_file(out / "model.safetensors")["model.norm.weight"]
        assert torch.equal(norm, saved_tensors(expected)["model.norm.weight"])
        shutil.rmtree(out)
    out.mkdir()
    export(last, out)
    assert names(tmp_path) == ["moved", "out"]


def test_what_is_wrong_is_told_and_nothing_is_written(runs, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    run, checkpoint, out = runs / "whole", checkpoints(runs / "whole")[-1], tmp_path / "out"
    code, output = command(tmp_path, "export", run, out, "--merge")
    assert (code, output) == (
        2,
        f"error: {checkpoint} has no adapter to merge; leave --merge out\n",
    )
    with pytest.raises(ConfigError, match="leave --dtype out, or write the whole model with --m"):
        export(runs / "adapter", out, dtype=torch.bfloat16)
    for source, directory, fault in [
        (tmp_path / "x", out, "x is neither a checkpoint nor the directory of a run"),
        (tmp_path / "full", out, "full is neither a checkpoint nor the directory of a run"),
        (tmp_path / "empty", out, "the run in .*empty has no checkpoint yet"),
        (run, tmp_path / "full", "full is there already; choose an empty directory, or a new one"),
        (run, tmp_path / "full" / "file", "file is there already"),
        (run, tmp_path / "full" / "file" / "out", "out cannot be written: "),
        (run, checkpoint / "out", "out is inside the checkpoint, which is not to be changed"),
    ]:
        with pytest.raises(ConfigError, match=fault):
            export(source, directory)
    assert names(tmp_path) == ["empty", "full"]
    assert names(tmp_path / "full") == ["file"]
    assert verify(checkpoint) == []


def changed(checkpoint: Path, path: Path, slot: str, **parameters: object) -> Path:
    """A copy of a checkpoint, as a run with other parameters would have written it."""
    shutil.copytree(checkpoint, path)
    saved = json.loads((path / "run.json").read_text())
    saved["config"][slot] |= parameters
    (path / "run.json").write_text(json.dumps(saved))
    sign(path)
    return path


def test_a_checkpoint_that_is_broken_or_of_another_model_is_told(runs, tmp_path):
    newest = checkpoints(runs / "whole")[-1]
    other = changed(newest, tmp_path / "other", "model", layers=1)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight is in it, but not in"):
        export(other, tmp_path / "out")
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"broken:\n  tokenizer\.json has 2 bytes, not"):
        export(other, tmp_path / "out")
    assert names(tmp_path) == ["other"]


def test_weights_that_are_not_finite_are_not_written(runs, tmp_path):
    tensors = load_file(runs / "base.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"][3, 2] = torch.nan
    save_file(tensors, tmp_path / "bad.safetensors")
    newest, weights = checkpoints(runs / "adapter")[-1], str(tmp_path / "bad.safetensors")
    bad = changed(newest, tmp_path / "checkpoint", "model", weights=weights)
    with pytest.raises(
        ConfigError, match=r"merging makes .*1\.self_attn\.q_proj\.weight infinite or not"
    ):
        export(bad, tmp_path / "out", merge=True)
    assert names(tmp_path) == ["bad.safetensors", "checkpoint"]


def test_an_architecture_that_cannot_do_without_sharing_is_told(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(Decoder, "untied", staticmethod(lambda params: None))
    with pytest.raises(ConfigError, match=r"merging gives lm_head\.weight other values than"):
        export(runs / "tied", tmp_path / "out", merge=True)
    assert names(tmp_path) == []

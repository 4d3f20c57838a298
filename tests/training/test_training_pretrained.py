"""Exports as transformers reads them: in shards, rounded, with tokenizers of any kind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import typer
from exports import checkpoints, command, logits, names, saved_tensors, sign, train
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from core_plugin import config
from core_plugin.builtin.decoder import Decoder
from core_plugin.builtin.decoder_model import CausalLM
from core_plugin.cli import export as cli
from core_plugin.training import pretrained
from core_plugin.training.assembly import build_model, shard_model
from core_plugin.training.export import export
from core_plugin.training.world import join

SIZES = {"hidden_size": 16, "layers": 2, "heads": 4, "key_value_heads": 2, "intermediate_size": 48}
SIZES |= {"rope_theta": 500.0, "norm_eps": 1e-3}
CHAT = [
    {"role": "system", "content": "Count."},
    {"role": "user", "content": "One, two, and then?"},
    {"role": "assistant", "content": "Three comes then, and after it four."},
]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a whole model that learned chats under DDP."""
    path = tmp_path_factory.mktemp("chat")
    (path / "chat.jsonl").write_text(json.dumps({"messages": CHAT}))
    data = {"name": "jsonl", "path": "chat.jsonl", "sequence_length": 64, "vocabulary_size": 280}
    train(path, "run", 2, distributed="ddp", data=data, model={"name": "decoder", **SIZES})
    return checkpoints(path / "run")[-1]


def in_transformers(directory: Path) -> torch.nn.Module:
    model, found = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(found.values()), found
    return model


def trained_model(checkpoint: Path) -> CausalLM:
    tensors = saved_tensors(checkpoint)
    model = CausalLM(Decoder.Params(**SIZES), len(tensors["lm_head.weight"]))
    model.load_state_dict(tensors)
    return model


def read_model(directory: Path, vocabulary_size: int) -> torch.nn.Module:
    """What a run whose ``model.weights`` is the directory begins with."""
    model = {"name": "decoder", **SIZES, "weights": str(directory)}
    data = {"name": "text", "path": "unread.txt"}
    run = config.resolve({"model": model, "data": data, "train": {"steps": 1}, "device": "cpu"})
    with join(None) as world:
        described = build_model(run, vocabulary_size)
        return shard_model(run, described, torch.device("cpu"), world)


def test_a_model_in_shards_is_the_model_in_one_file(chat, tmp_path):
    code, output = command(tmp_path, "export", chat, "shards", "--shard-size", "8kB")
    assert code == 0, output
    export(chat, tmp_path / "one")
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert f"config.json, model-*-of-{len(shards):05d}.safetensors, model.safet" in output
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert len({path.stat().st_mode for path in (tmp_path / "shards").iterdir()}) == 1
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    content = {shard.name: load_file(shard) for shard in shards}
    assert index["weight_map"] == {name: file for file, held in content.items() for name in held}
    sizes = {f: [t.nbytes for t in held.values()] for f, held in content.items()}
    assert all(sum(size) <= 8000 or len(size) == 1 for size in sizes.values())
    assert max(len(size) for size in sizes.values()) > 1
    assert max(map(sum, sizes.values())) > 8000
    assert index["metadata"]["total_size"] == sum(map(sum, sizes.values()))
    found = {name: tensor for held in content.values() for name, tensor in held.items()}
    whole, saved = load_file(tmp_path / "one" / "model.safetensors"), saved_tensors(chat)
    assert found.keys() == whole.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(found[name], tensor)
        assert torch.equal(whole[name], tensor)


def test_transformers_and_a_run_compute_what_the_trained_model_does(chat, tmp_path):
    export(chat, tmp_path / "shards", shard_size=8000)
    export(chat, tmp_path / "one")
    trained = trained_model(chat)
    sharded, whole = in_transformers(tmp_path / "shards"), in_transformers(tmp_path / "one")
    assert sharded.dtype == torch.float32
    assert torch.equal(logits(sharded), logits(whole))
    torch.testing.assert_close(logits(whole), logits(trained), rtol=0, atol=1e-6)
    resumed = read_model(tmp_path / "shards", trained.lm_head.out_features)
    assert torch.equal(logits(resumed), logits(trained))


def test_rounded_models_are_rounded_once(chat, tmp_path):
    cli.export(chat, tmp_path / "out", shard_size=10**9, dtype=cli.DType.bfloat16)
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in saved_tensors(chat).items():
        assert torch.equal(written[name], tensor.bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = in_transformers(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    rounded = trained_model(chat).bfloat16()
    torch.testing.assert_close(logits(loaded.float()), logits(rounded.float()))


def test_the_tokenizer_gives_the_same_ids_and_knows_where_an_answer_ends(chat, tmp_path):
    export(chat, tmp_path / "out")
    own = Tokenizer.from_file(str(chat / "tokenizer.json"))
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "<|user|>One , two: \n  Ünï 'd<|end|><|assistant|>four <|other|><|end|>"
    ids = loaded(text)["input_ids"]
    assert ids == own.encode(text).ids
    assert loaded.decode(ids) == text
    assert loaded.decode(ids, skip_special_tokens=True) == "One , two: \n  Ünï 'dfour <|other|>"
    assert (loaded.eos_token, loaded.bos_token) == ("<|end|>", None)
    marks = {"<|end|>", "<|system|>", "<|user|>", "<|assistant|>"}
    assert set(loaded.all_special_tokens) == marks
    assert len(loaded) == own.get_vocab_size()
    model = in_transformers(tmp_path / "out")
    assert model.generation_config.eos_token_id == own.token_to_id("<|end|>")
    assert model.config.bos_token_id is None


@pytest.mark.parametrize("template", [None, "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("end", [None, "<|x|>", "<|unknown|>"])
def test_special_tokens_are_those_put_around_a_text_and_that_of_the_data(tmp_path, template, end):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", "<|x|>"]
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["hello world, here it is"] * 3, trainer)
    if template:
        around = [("<s>", 1), ("</s>", 2)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=around
        )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = pretrained.special_tokens(tokenizer, end)
    expected = {"bos": 1} if template and "<s>" in template else {}
    expected |= {"eos": 2} if template and "</s>" in template else {}
    expected |= {"eos": 3} if end == "<|x|>" else {}
    assert found == expected
    pretrained.write_tokenizer_config(tmp_path, tokenizer, found)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.bos_token_id, loaded.eos_token_id) == (found.get("bos"), found.get("eos"))
    assert loaded("hello<|x|> is it?")["input_ids"] == tokenizer.encode("hello<|x|> is it?").ids
    assert sorted(loaded.all_special_ids) == [0, 1, 2, 3]


def test_an_architecture_that_transformers_lacks_is_told(chat, tmp_path, monkeypatch):
    monkeypatch.setattr(Decoder, "transformers_config", staticmethod(lambda *_: None))
    exported = export(chat, tmp_path / "out")
    assert exported.notes == [
        "there is no config.json: the architecture 'decoder' names none of transformers, which "
        "cannot load the model by itself"
    ]
    assert names(tmp_path / "out") == [
        "model.safetensors",
        "run.yaml",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_disk_that_is_full_is_told_and_nothing_is_left(chat, tmp_path):
    code, output = command(
        tmp_path, "export", chat, "out", "--shard-size", "8kB", file_limit=10_000
    )
    assert code == 2
    assert output.startswith("error: out cannot be written: ")
    assert "File too large" in output
    assert output.count("\n") == 1
    assert names(tmp_path) == []


def test_sizes_have_units():
    assert [cli.size(text) for text in ("5GB", "1.5 MiB", "7")] == [5 * 10**9, 3 * 2**19, 7]
    for text in ("5XB", "0", "-1GB", "many"):
        with pytest.raises(typer.BadParameter, match=f"'{text}' is no size, such as 500MB or 2GiB"):
            cli.size(text)


def test_an_export_needs_the_memory_of_one_shard(chat, tmp_path):
    large = {**SIZES, "hidden_size": 512, "layers": 16}
    large |= {"heads": 8, "key_value_heads": 8, "intermediate_size": 1408}
    copy = shutil.copytree(chat, tmp_path / "checkpoint")
    saved = json.loads((copy / "run.json").read_text())
    saved["config"]["model"] |= large
    (copy / "run.json").write_text(json.dumps(saved))
    vocabulary_size = len(saved_tensors(chat)["lm_head.weight"])
    with torch.device("meta"):
        model = CausalLM(Decoder.Params(**large), vocabulary_size)
    tensors = {f"model.{n}": torch.ones(p.shape) for n, p in model.named_parameters()}
    total = sum(t.nbytes for t in tensors.values())
    assert total > 200e6
    shutil.rmtree(copy / "state")
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        dcp.save(tensors, checkpoint_id=copy / "state", no_dist=True)
    sign(copy)
    script = Path(__file__).with_name("export_memory.py")
    done = subprocess.run(
        [sys.executable, script, chat, copy, tmp_path, "20000000"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    assert int(done.stdout) < 60e6
    assert len(list((tmp_path / "large").glob("*.safetensors"))) > 10

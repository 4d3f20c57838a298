"""Muon's choice of parameters in models of other libraries, and its rules as a run has them."""

from __future__ import annotations

import json

import pytest
import torch

from core_plugin import config
from core_plugin.cli.schema import run_schema
from core_plugin.errors import ConfigError
from core_plugin.training.assembly import build_model
from core_plugin_muon import Muon, route
from core_plugin_muon.options import Rule

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": None,
}
UNTAKEN = "no layer takes its outputs: an output head (a guess)"
LLAMA = {
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
}


def of_muon(model) -> set[str]:
    """What Muon takes of the last of two layers; in the first it is the same, and there alone."""
    names = [row.name.removesuffix(".weight") for row in route(model) if row.algorithm == "muon"]
    first, last = ([name for name in names if f".{layer}." in name] for layer in (0, 1))
    assert names == [*first, *last]
    assert [name.replace(".0.", ".1.") for name in first] == last
    return {name.partition(".1.")[2] for name in last}


def reasons(model) -> dict[str, str]:
    return {row.name: row.reason for row in route(model)}


@pytest.fixture(autouse=True)
def on_meta():
    with torch.device("meta"):
        yield


@pytest.fixture
def gpt2():
    from transformers import GPT2Config

    return GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=48)


def test_gpt2_with_its_tied_head_and_transposed_layers(gpt2):
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel(gpt2)
    assert of_muon(model) == {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    found = reasons(model)
    assert found["transformer.wte.weight"] == "tied to an embedding"
    assert found["transformer.wpe.weight"] == "embedding"
    assert "lm_head.weight" not in found


@pytest.mark.parametrize("labels", [2, 16])
def test_a_classifier_on_gpt2(gpt2, labels):
    from transformers import GPT2ForSequenceClassification

    gpt2.num_labels = labels
    found = reasons(GPT2ForSequenceClassification(gpt2))
    assert (
        found["score.weight"]
        == {
            2: UNTAKEN,
            16: "named like an output head (a guess)",
        }[labels]
    )


@pytest.mark.parametrize("tied", [False, True])
def test_llama(tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    assert of_muon(model) == LLAMA
    found = reasons(model)
    table = "tied to an embedding" if tied else "embedding"
    assert found["model.embed_tokens.weight"] == table
    assert found.get("lm_head.weight", "output head") == "output head"


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_mixtures_of_experts(name):
    import transformers

    experts = {"Mixtral": "num_local_experts", "Qwen3Moe": "num_experts"}[name]
    settings = getattr(transformers, f"{name}Config")(
        **SIZES, **{experts: 4}, num_experts_per_tok=2, moe_intermediate_size=24
    )
    model = getattr(transformers, f"{name}ForCausalLM")(settings)
    attention = {part for part in LLAMA if "self_attn" in part}
    assert of_muon(model) == attention | {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    found = reasons(model)
    assert found["model.layers.0.mlp.experts.down_proj"] == "stack of experts"
    assert found["model.layers.0.mlp.gate.weight"] == "matrix of no known layer"

    rules = [Rule("gate_up_proj", "muon", split=(24, 24))]
    rows = Muon.for_model(model, rules).describe_parameters(world_size=4)
    fused = next(row for row in rows if row["parameter"].endswith("1.mlp.experts.gate_up_proj"))
    assert (fused["shape"], fused["owner"]) == ((4, 48, 16), "0-3")
    assert fused["scale"] == pytest.approx(0.2 * 24**0.5)


def test_bert_and_its_head_behind_a_hidden_layer():
    from transformers import BertConfig, BertForMaskedLM

    sizes = {key: SIZES[key] for key in SIZES if "key_value" not in key and key != "head_dim"}
    sizes["pad_token_id"] = 0
    found = {row.name: row for row in route(BertForMaskedLM(BertConfig(**sizes)))}
    assert found["cls.predictions.transform.dense.weight"].algorithm == "muon"
    assert found["bert.embeddings.word_embeddings.weight"].reason == "tied to an embedding"
    assert found["bert.embeddings.token_type_embeddings.weight"].reason == "embedding"
    assert found["bert.encoder.layer.1.attention.output.dense.weight"].algorithm == "muon"


def test_a_vision_model_of_patches():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "intermediate_size": 24, "image_size": 16, "patch_size": 4}
    settings = ViTConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, num_labels=10)
    found = {row.name: row for row in route(ViTForImageClassification(settings))}
    patches = found["vit.embeddings.patch_embeddings.projection.weight"]
    assert (patches.algorithm, patches.flatten) == ("muon", True)
    assert found["vit.embeddings.position_embeddings"].algorithm == "adamw"
    assert found["classifier.weight"].reason == UNTAKEN
    assert sum(row.algorithm == "muon" for row in found.values()) == 1 + 2 * 6


def test_the_classes_of_a_segmentation_are_a_head():
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    model = SegformerForSemanticSegmentation(SegformerConfig(num_labels=19))
    guesses = [name for name, reason in reasons(model).items() if "guess" in reason]
    assert guesses == ["decode_head.classifier.weight"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_factors_of_the_peft_library_are_left_to_adamw():
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES)), settings)
    with pytest.raises(ValueError, match="adapter: 5, such as"):
        route(model)
    model.base_model.model.model.layers.requires_grad_(True)
    rows = {row.name: row for row in route(model)}
    assert {row.reason for name, row in rows.items() if "lora_" in name} == {"adapter"}
    assert {row.algorithm for name, row in rows.items() if "base_layer" in name} == {"muon"}


def test_an_adapter_of_a_run(workspace):
    lora = {"name": "lora", "r": 4, "target_modules": ["q_proj"]}
    model = build_model(workspace.resolve(workspace.small(peft=lora)), 300)
    with pytest.raises(ValueError, match="adapter: 4, such as"):
        route(model)
    model.requires_grad_(True)
    assert of_muon(model) == {f"{name}.base_layer" if "q_" in name else name for name in LLAMA}


# Rules in a run's file

RUN = """\
model: decoder
data: {name: text, path: corpus.txt}
train: {steps: 1}
optimizer:
  name: muon
  ns_coefficients: [[4, -6.9, 3], [3.5, -4.8, 2]]
  ns_steps: 2
  rules:
    - match: qkv
      to: muon
      split: [8, 4, 4]
    - {match: router, to: adamw}
"""


def load(tmp_path, *overrides, text=RUN):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return config.load(file, overrides)["optimizer"].params


def test_rules_are_read_from_the_file_and_changed_on_the_command_line(tmp_path):
    params = load(tmp_path)
    assert params.rules == (Rule("qkv", "muon", split=(8, 4, 4)), Rule("router", "adamw"))
    assert params.ns_coefficients == ((4, -6.9, 3), (3.5, -4.8, 2))
    changed = load(
        tmp_path, "optimizer.rules.0.split=[12,4]", "optimizer.rules.1={match: x, to: skip}"
    )
    assert changed.rules == (Rule("qkv", "muon", split=(12, 4)), Rule("x", "skip"))
    assert load(tmp_path, "optimizer.rules=[]").rules == ()


def test_faults_in_rules_are_told_with_file_line_and_key(tmp_path):
    text = RUN.replace("to: muon", "to: moun").replace("4, 4]", "a, 4]")
    text = text.replace("to: adamw}", "to: adamw, spilt: [2]}")
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text=text)
    file = tmp_path / "run.yaml"
    assert sorted(str(error.value).splitlines()) == [
        f"{file}:10: optimizer.rules.0.to: must be 'muon', 'adamw' or 'skip', got 'moun'",
        f"{file}:11: optimizer.rules.0.split.1: must be a valid integer, got 'a'",
        f"{file}:12: optimizer.rules.1.spilt: is not a known parameter; did you mean split?",
    ]
    with pytest.raises(ConfigError, match=r"run\.yaml:9: optimizer\.rules\.0: match: '\(' is no"):
        load(tmp_path, text=RUN.replace("match: qkv", 'match: "("'))
    override = "optimizer.rules.1.to=none"
    with pytest.raises(ConfigError, match=rf"'{override}': optimizer\.rules\.1\.to: must be"):
        load(tmp_path, override)


def test_the_schema_has_the_rules():
    text = json.dumps(run_schema())
    assert "regular expression, searched for in a parameter's name" in text
    assert '"enum": ["muon", "adamw", "skip"]' in text

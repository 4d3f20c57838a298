"""Interoperation with the peft library, both ways: names, files, results."""

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from core_plugin.adapters import inject, load_adapter, save_adapter
from core_plugin.errors import CheckpointError
from core_plugin_lora.plugin import LoRA, LoRAParams

# What peft itself asks of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8, bias=False)
        self.down = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.q_proj(x)))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 8, padding_idx=2)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def small() -> nn.Module:
    torch.manual_seed(0)
    return Small().eval()


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=13,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config).eval()


TOKENS = torch.tensor([[1, 2, 12, 5, 5]])
CASES = [
    (small, {"target_modules": ["q_proj", "down"]}),
    (small, {"target_modules": ["q_proj", "tokens"], "use_rslora": True, "r": 4, "lora_alpha": 3}),
    (small, {"target_modules": r"layers\.1\..*proj", "lora_alpha": 7.5, "lora_dropout": 0.1}),
    (small, {"target_modules": ["layers.0.q_proj", "down"], "exclude_modules": ["1.down"]}),
    (llama, {"target_modules": "all-linear", "r": 2}),
    (llama, {"target_modules": "all-linear", "exclude_modules": ["o_proj", "mlp.up_proj"]}),
    (llama, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
]
both_ways = pytest.mark.parametrize(("build", "settings"), CASES)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        result = model(TOKENS)
    return result if isinstance(result, Tensor) else result.logits


def randomize(model: nn.Module) -> None:
    """As if it had been trained."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)


def ours(build: object, params: LoRAParams, adapter: str = "default") -> nn.Module:
    model = build()
    inject(model, LoRA, params, adapter)
    return model.eval()


def peft_config(settings: dict[str, object]) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 8, "lora_alpha": 16, **settings})


def assert_same_files(first: Path, second: Path) -> None:
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in (first, second))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


@both_ways
def test_peft_reads_what_is_saved_here(
    build: object, settings: dict[str, object], tmp_path: Path
) -> None:
    params = LoRAParams(**settings)
    model = ours(build, params)
    randomize(model)
    expected = logits(model)
    assert (expected - logits(build())).abs().max() > 1e-2
    save_adapter(tmp_path / "ours", LoRA, params, model.state_dict(), "default", None)
    theirs = peft.PeftModel.from_pretrained(build(), tmp_path / "ours")
    torch.testing.assert_close(logits(theirs), expected, rtol=0, atol=1e-6)
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


@both_ways
def test_what_peft_saves_is_read_here(
    build: object, settings: dict[str, object], tmp_path: Path
) -> None:
    theirs = peft.get_peft_model(build(), peft_config(settings)).eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path, save_embedding_layers=False)
    params = LoRAParams(**settings)
    model = ours(build, params, "other")
    load_adapter(model, tmp_path, LoRA, params, "other")
    torch.testing.assert_close(logits(model), logits(theirs), rtol=0, atol=1e-6)
    save_adapter(tmp_path / "again", LoRA, params, model.state_dict(), "other", None)
    assert_same_files(tmp_path, tmp_path / "again")


@both_ways
def test_names_in_memory_are_those_of_peft(build: object, settings: dict[str, object]) -> None:
    theirs = peft.inject_adapter_in_model(peft_config(settings), build())
    state = ours(build, LoRAParams(**settings)).state_dict()
    assert {n: t.shape for n, t in state.items()} == {
        n: t.shape for n, t in theirs.state_dict().items()
    }


def test_every_setting_in_the_file_is_one_that_peft_knows(tmp_path: Path) -> None:
    params = LoRAParams(target_modules=["q_proj"], r=4, lora_alpha=3, use_rslora=True)
    model = ours(small, params)
    save_adapter(tmp_path, LoRA, params, model.state_dict(), "default", "some/base")
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    read = peft.PeftConfig.from_pretrained(tmp_path)
    assert isinstance(read, peft.LoraConfig)
    assert written.pop("peft_type") == read.peft_type.value
    assert set(written.pop("target_modules")) == read.target_modules
    assert {name: getattr(read, name) for name in written} == written
    defaults = peft.LoraConfig()
    changed = {"r", "lora_alpha", "use_rslora", "inference_mode", "base_model_name_or_path"}
    assert {n for n, v in written.items() if getattr(defaults, n) != v} == changed


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        ({"lora_alpha": 32}, ["lora_alpha: 32 in adapter_config.json, 16 in the model"]),
        ({"use_rslora": True}, ["use_rslora: True"]),
        ({"use_dora": True}, ["use_dora: True", "lora_magnitude_vector: unexpected"]),
        ({"r": 4}, ["r: 4", "layers.0.q_proj.lora_A.weight: shape [4, 8] in the file, [8, 8]"]),
        ({"rank_pattern": {"0.q_proj": 2}}, ["rank_pattern: {'0.q_proj': 2}", "shape [2, 8]"]),
        ({"target_modules": ["down"]}, ["q_proj.lora_A.weight: missing", "down.lora_A.weight: un"]),
    ],
)
def test_what_this_method_would_compute_otherwise_is_refused(
    settings: dict[str, object], messages: list[str], tmp_path: Path
) -> None:
    theirs = peft.get_peft_model(small(), peft_config({"target_modules": ["q_proj"], **settings}))
    theirs.save_pretrained(tmp_path)
    params = LoRAParams(target_modules=["q_proj"])
    model = ours(small, params)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_adapter(model, tmp_path, LoRA, params, "default")
    for message in messages:
        assert message in str(caught.value)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])

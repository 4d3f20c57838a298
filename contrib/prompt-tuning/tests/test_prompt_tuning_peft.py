"""Interoperation with the peft library, both ways: files and results."""

import json
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from core_plugin.adapters import inject, load_adapter, save_adapter
from core_plugin.errors import CheckpointError
from core_plugin.types import PeftPlugin
from core_plugin_prompt_tuning.plugin import PromptTuning, PromptTuningParams

# What peft itself asks of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

IDS = torch.tensor([[1, 2, 12, 5, 5], [7, 0, 3, 3, 9]])
COUNT = 3
PARAMS = PromptTuningParams(num_virtual_tokens=COUNT)
Build = Callable[[], nn.Module]


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=13,
        max_position_embeddings=32,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=13, n_positions=32)
    return GPT2LMHeadModel(config).eval()


both_ways = pytest.mark.parametrize("build", [llama, gpt2])


def ours(build: Build, adapter: str = "default") -> nn.Module:
    model = build()
    torch.manual_seed(1)
    inject(model, PromptTuning, PARAMS, adapter)
    return model.eval()


def theirs(build: Build, **settings: object) -> nn.Module:
    settings = {"num_virtual_tokens": COUNT, "task_type": "CAUSAL_LM", **settings}
    torch.manual_seed(2)
    return peft.get_peft_model(build(), peft.PromptTuningConfig(**settings)).eval()


def logits(model: nn.Module) -> Tensor:
    """Those of the tokens; peft gives those of the virtual ones too."""
    with torch.no_grad():
        return model(input_ids=IDS).logits[:, -IDS.shape[1] :]


def tensors(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "adapter_model.safetensors")


@both_ways
def test_peft_reads_what_is_saved_here(build: Build, tmp_path: Path) -> None:
    model = ours(build)
    save_adapter(tmp_path / "ours", model)
    saved = tensors(tmp_path / "ours")
    assert {name: tensor.shape for name, tensor in saved.items()} == {
        "prompt_embeddings": (COUNT, 16)
    }
    read = peft.PeftModel.from_pretrained(build(), tmp_path / "ours")
    assert isinstance(read, peft.PeftModelForCausalLM)
    torch.testing.assert_close(logits(read), logits(model), rtol=0, atol=1e-6)
    assert (logits(model) - logits(build())).abs().max() > 1e-2
    read.save_pretrained(tmp_path / "theirs")
    again = tensors(tmp_path / "theirs")
    assert again.keys() == saved.keys()
    assert torch.equal(again["prompt_embeddings"], saved["prompt_embeddings"])


@both_ways
@pytest.mark.parametrize("beginning", ["RANDOM", "SAMPLE_VOCAB"])
def test_what_peft_saves_is_read_here(build: Build, beginning: str, tmp_path: Path) -> None:
    trained = theirs(build, prompt_tuning_init=beginning)
    trained.save_pretrained(tmp_path)
    model = ours(build, "other")
    load_adapter(model, tmp_path, "other")
    torch.testing.assert_close(logits(model), logits(trained), rtol=0, atol=1e-6)
    by_file = build()
    assert PeftPlugin.from_pretrained(by_file, tmp_path) is PromptTuning
    torch.testing.assert_close(logits(by_file.eval()), logits(trained), rtol=0, atol=1e-6)
    save_adapter(tmp_path / "again", by_file)
    again = tensors(tmp_path / "again")
    assert torch.equal(again["prompt_embeddings"], tensors(tmp_path)["prompt_embeddings"])


def test_every_setting_in_the_file_is_one_that_peft_knows(tmp_path: Path) -> None:
    save_adapter(tmp_path, ours(llama), base_model="some/base")
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    read = peft.PeftConfig.from_pretrained(tmp_path)
    assert isinstance(read, peft.PromptTuningConfig)
    assert {name: getattr(read, name) for name in written} == written
    names = {"auto_mapping", "peft_version", "revision"}
    assert written.keys() | names == theirs(llama).peft_config["default"].to_dict().keys()


def test_training_goes_on_as_it_would_in_peft(tmp_path: Path) -> None:
    trained, model = theirs(llama), llama()
    trained.save_pretrained(tmp_path)
    PeftPlugin.from_pretrained(model, tmp_path, trainable=True)
    curves = []
    for each in (trained, model):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=0.05)
        losses = []
        for _ in range(4):
            loss = each(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS).loss
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        curves.append(losses)
    assert curves[0][-1] < curves[0][0]
    assert curves[1] == pytest.approx(curves[0], abs=1e-5)


def test_files_for_something_else_are_refused(tmp_path: Path) -> None:
    theirs(llama, num_virtual_tokens=4).save_pretrained(tmp_path / "longer")
    model = ours(llama)
    before = model.prompt_encoder.prompt_embeddings["default"].clone()
    with pytest.raises(CheckpointError) as caught:
        load_adapter(model, tmp_path / "longer")
    assert "num_virtual_tokens: 4" in str(caught.value)
    assert "shape [4, 16] in the file, [3, 16] in the model" in str(caught.value)
    assert torch.equal(model.prompt_encoder.prompt_embeddings["default"], before)
    theirs(llama).save_pretrained(tmp_path / "classes")
    file = tmp_path / "classes" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"task_type": "SEQ_CLS"}))
    with pytest.raises(CheckpointError, match="task_type: 'SEQ_CLS'"):
        PeftPlugin.from_pretrained(llama(), tmp_path / "classes")


def test_that_it_began_as_a_text_is_no_fault(tmp_path: Path) -> None:
    trained, model = theirs(llama), llama()
    trained.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    text = {"prompt_tuning_init_text": "Say:", "tokenizer_name_or_path": "some/tokenizer"}
    changed = json.loads(file.read_text()) | {"prompt_tuning_init": "TEXT", **text}
    file.write_text(json.dumps(changed))
    PeftPlugin.from_pretrained(model, tmp_path)
    torch.testing.assert_close(logits(model.eval()), logits(trained), rtol=0, atol=1e-6)

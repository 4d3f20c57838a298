"""Interoperation with the peft library, both ways: names, files, results."""

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
from core_plugin_ia3.plugin import IA3, IA3Params

pytestmark = [
    # What peft itself asks of transformers, and what it says of every model with Conv1D.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rise = nn.Conv2d(3, 8, 3, padding=1)
        self.fall = nn.Conv2d(8, 4, 3, groups=2, padding=1)
        self.deep = nn.Conv3d(1, 2, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.linspace(-1, 1, 3 * 5 * 5).view(1, 3, 5, 5) * tokens.sum()
        return self.deep(self.fall(torch.tanh(self.rise(x)))[:, None])


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return Convolutions().eval()


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


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=13, n_positions=16)
    return GPT2LMHeadModel(config).eval()


Case = tuple[Callable[[], nn.Module], dict[str, object]]
TOKENS = torch.tensor([[1, 2, 12, 5, 5]])
CASES: list[Case] = [
    (
        llama,
        {
            "target_modules": ["k_proj", "v_proj", "down_proj"],
            "feedforward_modules": ["down_proj"],
        },
    ),
    (llama, {"target_modules": ["v_proj"], "feedforward_modules": []}),
    (llama, {"target_modules": "all-linear", "feedforward_modules": r".*(up|down)_proj"}),
    (
        llama,
        {
            "target_modules": r".*\.0\..*_proj",
            "feedforward_modules": r".*down_proj",
            "exclude_modules": ["up_proj"],
        },
    ),
    (gpt2, {"target_modules": ["c_attn", "mlp.c_proj"], "feedforward_modules": ["mlp.c_proj"]}),
    (convolutions, {"target_modules": ["rise", "fall", "deep"], "feedforward_modules": ["fall"]}),
    (
        llama,
        {
            "target_modules": ["k_proj", "down_proj"],
            "feedforward_modules": ["down_proj"],
            "modules_to_save": ["lm_head"],
        },
    ),
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
            nn.init.uniform_(parameter, 0.5, 2)


def ours(build: Callable[[], nn.Module], settings: dict, adapter: str = "default") -> nn.Module:
    model = build()
    inject(model, IA3, IA3Params(**settings), adapter)
    return model.eval()


def theirs(build: Callable[[], nn.Module], settings: dict, **more: object) -> nn.Module:
    config = peft.IA3Config(**settings, **more)
    return peft.get_peft_model(build(), config).eval()


def assert_same_tensors(first: Path, second: Path) -> None:
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in (first, second))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


@both_ways
def test_peft_reads_what_is_saved_here(
    build: Callable[[], nn.Module], settings: dict, tmp_path: Path
) -> None:
    model = ours(build, settings)
    randomize(model)
    save_adapter(tmp_path / "ours", model)
    read = peft.PeftModel.from_pretrained(build(), tmp_path / "ours")
    torch.testing.assert_close(logits(read), logits(model), rtol=0, atol=1e-6)
    assert (logits(model) - logits(build())).abs().max() > 1e-3
    read.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    assert_same_tensors(tmp_path / "ours", tmp_path / "theirs")


@both_ways
def test_what_peft_saves_is_read_here(
    build: Callable[[], nn.Module], settings: dict, tmp_path: Path
) -> None:
    trained = theirs(build, settings)
    randomize(trained)
    trained.save_pretrained(tmp_path, save_embedding_layers=False)
    model = ours(build, settings, "other")
    load_adapter(model, tmp_path, "other")
    torch.testing.assert_close(logits(model), logits(trained), rtol=0, atol=1e-6)
    by_file = build()
    assert PeftPlugin.from_pretrained(by_file, tmp_path) is IA3
    torch.testing.assert_close(logits(by_file.eval()), logits(trained), rtol=0, atol=1e-6)
    save_adapter(tmp_path / "again", by_file)
    assert_same_tensors(tmp_path, tmp_path / "again")


@both_ways
def test_names_in_memory_are_those_of_peft(build: Callable[[], nn.Module], settings: dict) -> None:
    expected = peft.inject_adapter_in_model(peft.IA3Config(**settings), build()).state_dict()
    state = ours(build, settings).state_dict()
    if "modules_to_save" not in settings:  # peft keeps their originals under another name
        assert state.keys() == expected.keys()
    ours_alone = {n: t.shape for n, t in state.items() if "ia3_" in n}
    assert ours_alone == {n: t.shape for n, t in expected.items() if "ia3_" in n}


def test_every_setting_in_the_file_is_one_that_peft_knows(tmp_path: Path) -> None:
    model = ours(llama, CASES[0][1])
    save_adapter(tmp_path, model, base_model="some/base")
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    read = peft.PeftConfig.from_pretrained(tmp_path)
    assert isinstance(read, peft.IA3Config)
    assert written.pop("peft_type") == read.peft_type.value
    assert set(written.pop("target_modules")) == read.target_modules
    assert {n: v for n, v in written.items() if hasattr(read, n) and getattr(read, n) != v} == {}
    unknown = [name for name, value in written.items() if not hasattr(read, name) and value]
    assert unknown == []


def test_training_goes_on_as_it_would_in_peft(tmp_path: Path) -> None:
    settings = CASES[0][1]
    trained = theirs(llama, settings)
    randomize(trained)
    trained.save_pretrained(tmp_path)
    model = llama()
    PeftPlugin.from_pretrained(model, tmp_path, trainable=True)
    curves = []
    for each in (trained, model):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=0.01)
        losses = []
        for _ in range(4):
            loss = each(input_ids=TOKENS, labels=TOKENS).loss
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        curves.append(losses)
    assert curves[0][-1] < curves[0][0]
    assert curves[1] == pytest.approx(curves[0], abs=1e-6)


def test_a_file_whose_vectors_are_at_other_places_is_refused(tmp_path: Path) -> None:
    targets = ["k_proj", "down_proj"]
    settings = {"target_modules": targets, "feedforward_modules": ["down_proj"]}
    theirs(llama, settings).save_pretrained(tmp_path)
    model = ours(llama, {"target_modules": targets})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"down_proj.ia3_l: shape \[1, 24\] in the file, \[16"
    ):
        load_adapter(model, tmp_path)
    assert all(torch.equal(tensor, before[n]) for n, tensor in model.state_dict().items())


def test_how_peft_began_is_no_fault(tmp_path: Path) -> None:
    settings = CASES[0][1]
    trained = theirs(llama, settings, init_ia3_weights=False)
    trained.save_pretrained(tmp_path)
    model = llama()
    PeftPlugin.from_pretrained(model, tmp_path)
    torch.testing.assert_close(logits(model.eval()), logits(trained), rtol=0, atol=1e-6)

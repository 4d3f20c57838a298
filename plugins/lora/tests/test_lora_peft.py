"""Interoperation with the peft library, both ways: names, files, results, training."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from core_plugin.adapters import inject, load_adapter, save_adapter
from core_plugin.errors import CheckpointError
from core_plugin.types.peft import PeftPlugin
from core_plugin_lora.plugin import LoRA, LoRAParams

pytestmark = [
    # What peft itself asks of transformers.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    # What peft says of a base layer's kind, which it knows better than the configuration.
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to"),
    pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups"),
    # What peft says wrongly of the biases of B, and of patterns for parameters.
    pytest.mark.filterwarnings("ignore:Adapter 'default'. . LoRA tensor.s. have invalid shape"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match"),
]
CPU_THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(CPU_THREADS)


# Models


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8, bias=False)
        self.down = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.tanh(self.q_proj(x))))


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


class Convolutions(nn.Module):
    """Turns tokens into images, and those into logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 64)
        self.one = nn.Conv1d(4, 6, 3, stride=2, padding=1)
        self.two = nn.Conv2d(4, 6, (3, 2), padding=(1, 0), bias=False)
        self.grouped = nn.Conv2d(6, 4, 3, padding=1, groups=2)
        self.three = nn.Conv3d(4, 2, 3, padding=1)
        self.head = nn.Linear(136, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens.flatten())
        one = self.one(x.view(-1, 4, 16))
        two = self.grouped(torch.tanh(self.two(x.view(-1, 4, 4, 4))))
        three = self.three(x.view(-1, 4, 2, 2, 4))
        hidden = torch.tanh(torch.cat([one.flatten(1), two.flatten(1), three.flatten(1)], dim=1))
        return self.head(F.pad(hidden, (0, 136 - hidden.shape[1]))).view(*tokens.shape, 13)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 13,
    "max_position_embeddings": 16,
}


def small() -> nn.Module:
    return Small()


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def tied_llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))


def llama_classifier() -> nn.Module:
    return LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=3, pad_token_id=0))


def gpt2() -> nn.Module:
    config = GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=2,
        vocab_size=13,
        n_positions=16,
        attn_pdrop=0,
        embd_pdrop=0,
        resid_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    config = BertConfig(
        **sizes, num_labels=3, hidden_dropout_prob=0, attention_probs_dropout_prob=0
    )
    return BertForSequenceClassification(config)


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=3))


def qwen_moe() -> nn.Module:
    config = Qwen2MoeConfig(
        **SIZES,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=12,
    )
    return Qwen2MoeForCausalLM(config)


def fresh(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().eval()


# What is compared

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "linear": (small, {"target_modules": ["q_proj", "down"]}),
    "regex": (small, {"target_modules": r"layers\.1\..*proj", "lora_alpha": 7.5}),
    "exclude": (small, {"target_modules": ["0.q_proj", "down"], "exclude_modules": ["1.down"]}),
    "blocks": (llama, {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "layer list": (
        small,
        {"target_modules": ["down"], "layers_to_transform": 0, "layers_pattern": "layers"},
    ),
    "all-linear": (llama, {"target_modules": "all-linear", "r": 2}),
    "all-linear but": (
        llama,
        {"target_modules": "all-linear", "exclude_modules": ["o_proj", "mlp.up_proj"]},
    ),
    "embedding": (small, {"target_modules": ["q_proj", "tokens"], "r": 4}),
    "embedding and head": (llama, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "gpt2": (gpt2, {"target_modules": ["c_attn", "c_proj"]}),
    "gpt2 all-linear": (gpt2, {"target_modules": "all-linear"}),
    "convolutions": (convolutions := Convolutions, {"target_modules": ["one", "two", "three"]}),
    "grouped convolution": (convolutions, {"target_modules": ["grouped", "head"], "r": 4}),
    "attention": (Attention, {"target_modules": ["attention"]}),
    "attention and head": (Attention, {"target_modules": ["attention", "head"], "r": 2}),
    "rslora": (small, {"target_modules": ["q_proj", "tokens"], "use_rslora": True, "r": 4}),
    "dora": (llama, {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "dora gpt2": (gpt2, {"target_modules": ["c_attn"], "use_dora": True}),
    "dora embedding": (small, {"target_modules": ["tokens", "down"], "use_dora": True}),
    "dora convolutions": (
        convolutions,
        {"target_modules": ["one", "two", "three"], "use_dora": True},
    ),
    "lora_bias": (small, {"target_modules": ["down"], "lora_bias": True}),
    "lora_bias convolutions": (
        convolutions,
        {"target_modules": ["one", "three"], "lora_bias": True},
    ),
    "patterns": (
        llama,
        {
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {"q_proj": 2, "1.mlp.down_proj": 3},
            "alpha_pattern": {r"layers\.\d+\.self_attn\.v_proj": 5, "down_proj": 11},
        },
    ),
    "patterns and rslora": (
        small,
        {
            "target_modules": ["q_proj", "down"],
            "use_rslora": True,
            "rank_pattern": {"^layers.0.down": 3},
            "alpha_pattern": {"down": 2},
        },
    ),
    "modules_to_save": (small, {"target_modules": ["q_proj"], "modules_to_save": ["head", "norm"]}),
    "modules_to_save of transformers": (
        llama,
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    "bias of the layers": (small, {"target_modules": ["down"], "bias": "lora_only"}),
    "bias of all": (small, {"target_modules": ["down"], "bias": "all"}),
    "bias of convolutions": (convolutions, {"target_modules": ["one", "three"], "bias": "all"}),
    "bias of attention": (Attention, {"target_modules": ["attention"], "bias": "lora_only"}),
    "bias of all beside attention": (Attention, {"target_modules": ["attention"], "bias": "all"}),
    "bias and modules_to_save": (
        bert,
        {"target_modules": ["key"], "bias": "lora_only", "modules_to_save": ["pooler.dense"]},
    ),
    "dora, rslora and patterns": (
        llama,
        {
            "target_modules": "all-linear",
            "use_dora": True,
            "use_rslora": True,
            "rank_pattern": {"mlp.up_proj": 3},
            "alpha_pattern": {"layers.1.mlp.up_proj": 5},
        },
    ),
    "bias gpt2": (gpt2, {"target_modules": ["c_attn"], "bias": "lora_only"}),
    "token rows": (llama, {"target_modules": ["q_proj"], "trainable_token_indices": [5, 2, 11]}),
    "token rows by name": (
        small,
        {"target_modules": ["q_proj"], "trainable_token_indices": {"tokens": [1, 0]}},
    ),
    "token rows, tied": (
        tied_llama,
        {"target_modules": ["q_proj"], "trainable_token_indices": [5, 2, 11]},
    ),
    "sequence classification": (
        bert,
        {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"},
    ),
    "llama sequence classification": (
        llama_classifier,
        {"target_modules": ["q_proj"], "task_type": "SEQ_CLS"},
    ),
    "causal": (llama, {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}),
    "experts": (mixtral, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "one of the experts": (
        mixtral,
        {"target_modules": ["v_proj"], "target_parameters": ["experts.down_proj"]},
    ),
    "experts alone, with a pattern": (
        qwen_moe,
        {
            "target_modules": [],
            "target_parameters": EXPERTS,
            "rank_pattern": {"experts.down_proj": 2},
            "alpha_pattern": {"1.mlp.experts.gate_up_proj": 3},
        },
    ),
    **{
        f"init {init}": (
            llama,
            {"target_modules": ["q_proj", "up_proj"], "init_lora_weights": init},
        )
        for init in (True, False, "gaussian", "orthogonal", "pissa", "olora")
    },
}
every_case = pytest.mark.parametrize(("build", "settings"), CASES.values(), ids=CASES)

TOKENS = torch.tensor([[1, 2, 12, 5, 5], [11, 4, 3, 0, 6]])


def logits(model: nn.Module) -> Tensor:
    result = model(TOKENS)
    return result if isinstance(result, Tensor) else result.logits


def train(model: nn.Module, steps: int = 3) -> list[float]:
    """The losses of some steps with AdamW."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(steps):
        out = logits(model)
        targets = torch.arange(out[..., 0].numel()) % out.shape[-1]
        loss = F.cross_entropy(out.flatten(0, -2), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ours(
    build: Callable[[], nn.Module], settings: dict[str, Any], name: str = "default"
) -> nn.Module:
    model = fresh(build)
    torch.manual_seed(1)
    return inject(model, LoRA, LoRAParams(**settings), name).eval()


def theirs(build: Callable[[], nn.Module], settings: dict[str, Any]) -> peft.PeftModel:
    config = peft.LoraConfig(**{"r": 8, "lora_alpha": 16, **settings})
    torch.manual_seed(1)
    return peft.get_peft_model(fresh(build), config).eval()


def save_theirs(model: peft.PeftModel, directory: Path) -> None:
    model.save_pretrained(directory, save_embedding_layers=False)


def assert_close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def assert_same_tensors(first: Path, second: Path) -> None:
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in (first, second))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


def config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "adapter_config.json").read_text())


# Both ways


@every_case
def test_peft_reads_what_is_trained_here(
    build: Callable[[], nn.Module], settings: dict[str, Any], tmp_path: Path
) -> None:
    model = ours(build, settings)
    before = logits(model)
    train(model)
    expected = logits(model)
    assert (expected - before).abs().max() > 1e-4
    save_adapter(tmp_path / "ours", model)
    loaded = peft.PeftModel.from_pretrained(fresh(build), tmp_path / "ours")
    assert_close(logits(loaded), expected)
    save_theirs(loaded, tmp_path / "theirs")
    assert_same_tensors(tmp_path / "ours", tmp_path / "theirs")


@every_case
def test_what_peft_trained_is_read_here_and_trains_on_the_same(
    build: Callable[[], nn.Module], settings: dict[str, Any], tmp_path: Path
) -> None:
    original = theirs(build, settings)
    before = logits(original)
    train(original, steps=2)
    assert (logits(original) - before).abs().max() > 1e-4
    save_theirs(original, tmp_path / "theirs")
    model = fresh(build)
    method = PeftPlugin.from_pretrained(model, tmp_path / "theirs", "other", trainable=True)
    assert method is LoRA
    assert_close(logits(model), logits(original))
    save_adapter(tmp_path / "ours", model, "other")
    assert_same_tensors(tmp_path / "theirs", tmp_path / "ours")
    assert train(model) == pytest.approx(train(original), rel=1e-5)
    torch.testing.assert_close(logits(model), logits(original), rtol=1e-4, atol=1e-4)


@every_case
def test_an_adapter_that_is_there_takes_what_peft_saved(
    build: Callable[[], nn.Module], settings: dict[str, Any], tmp_path: Path
) -> None:
    original = theirs(build, settings)
    train(original, steps=1)
    save_theirs(original, tmp_path)
    model = ours(build, settings, "other")
    assert load_adapter(model, tmp_path, "other") == []
    assert_close(logits(model), logits(original))


@every_case
def test_settings_in_the_file_are_those_of_peft(
    build: Callable[[], nn.Module], settings: dict[str, Any], tmp_path: Path
) -> None:
    save_adapter(tmp_path / "ours", ours(build, settings), base_model="some/base")
    save_theirs(theirs(build, settings), tmp_path / "theirs")
    written, expected = config(tmp_path / "ours"), config(tmp_path / "theirs")
    of_the_run = {"auto_mapping", "peft_version", "revision"}
    assert written.keys() == expected.keys() - of_the_run
    read = peft.PeftConfig.from_pretrained(tmp_path / "ours")
    assert isinstance(read, peft.LoraConfig)
    # What may be said in other words, or is peft's own.
    said_otherwise = {
        "base_model_name_or_path",
        "exclude_modules",
        "fan_in_fan_out",
        "layers_pattern",
        "layers_to_transform",
        "modules_to_save",
        "target_modules",
    }
    for key, value in written.items():
        if key == "target_parameters":
            assert sorted(value or []) == sorted(expected[key] or [])
        elif key not in said_otherwise:
            assert value == expected[key], key


NAMES_OF_PEFT = {
    "original_module": "base_layer",
    "token_adapter.base_layer": "base_layer",
    "base_layer.out_proj.base_layer": "base_layer.out_proj",
    "base_layer.out_proj.lora_": "lora_out_",
}
"""Names in memory that are other ones here; those in files are the same."""


@every_case
def test_names_in_memory_are_those_of_peft(
    build: Callable[[], nn.Module], settings: dict[str, Any]
) -> None:
    expected = {}
    for name, tensor in theirs(build, settings).state_dict().items():
        name = name.removeprefix("base_model.model.")
        for other, here in NAMES_OF_PEFT.items():
            name = name.replace(other, here)
        expected[name] = tensor.shape
    state = ours(build, settings).state_dict()
    assert {name: tensor.shape for name, tensor in state.items()} == expected


# What differs, and what peft writes by itself


@pytest.mark.parametrize(
    ("in_file", "in_model", "messages"),
    [
        ({"lora_alpha": 32}, {}, ["lora_alpha: 32 in adapter_config.json, 16 in the model"]),
        ({"use_rslora": True}, {}, ["use_rslora: True in"]),
        ({"use_dora": True}, {}, ["use_dora: True in", "lora_magnitude_vector: unexpected"]),
        ({"bias": "lora_only"}, {}, ["bias: 'lora_only' in"]),
        ({"r": 4}, {}, ["r: 4 in", "layers.0.q_proj.lora_A.weight: shape [4, 8] in the file"]),
        ({"rank_pattern": {"0.q_proj": 2}}, {}, ["r: 2 in", "for layers.0.q_proj", "[2, 8]"]),
        ({"alpha_pattern": {"0.q_proj": 2}}, {}, ["lora_alpha: 2 in", "for layers.0.q_proj"]),
        ({"target_modules": ["down"]}, {}, ["q_proj.lora_A.weight: missing", "down.lora_A"]),
        ({"modules_to_save": ["head"]}, {}, ["head.weight: unexpected"]),
        ({"init_lora_weights": "pissa"}, {}, ["init_lora_weights: 'pissa' in"]),
        ({}, {"init_lora_weights": "olora"}, ["init_lora_weights: True in"]),
        ({"init_lora_weights": "orthogonal"}, {"init_lora_weights": False}, []),
        ({"lora_dropout": 0.5}, {"lora_dropout": 0.1}, []),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    in_file: dict[str, Any], in_model: dict[str, Any], messages: list[str], tmp_path: Path
) -> None:
    save_theirs(theirs(small, {"target_modules": ["q_proj"], **in_file}), tmp_path)
    model = ours(small, {"target_modules": ["q_proj"], **in_model})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if not messages:
        load_adapter(model, tmp_path)
        return
    with pytest.raises(CheckpointError) as caught:
        load_adapter(model, tmp_path)
    for message in messages:
        assert message in str(caught.value)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens: [1, 2] would change"),
        ({"use_qalora": True}, "use_qalora: True would change the result"),
        ({"layer_replication": [[0, 2]]}, "layer_replication: [[0, 2]] would change the result"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora: {'nblocks': 2} would change the result"),
        ({"init_lora_weights": "corda", "corda_config": {}}, "init_lora_weights is true, false"),
        ({"r": "eight"}, "r: must be a valid integer, got 'eight'"),
        ({"bias": "most"}, "bias: must be 'none', 'all' or 'lora_only', got 'most'"),
    ],
)
def test_settings_that_change_the_mathematics_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_theirs(theirs(small, {"target_modules": ["q_proj"]}), tmp_path)
    settings = config(tmp_path) | changes
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    model = fresh(small)
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(CheckpointError) as caught:
        PeftPlugin.from_pretrained(model, tmp_path)
    assert message in str(caught.value)
    assert [name for name, _ in model.named_modules()] == names


def test_a_file_with_the_least_that_peft_needs(tmp_path: Path) -> None:
    original = theirs(small, {"target_modules": ["q_proj"], "lora_alpha": 8})
    train(original)
    save_theirs(original, tmp_path)
    settings = {"peft_type": "LORA", "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    model = fresh(small)
    PeftPlugin.from_pretrained(model, tmp_path)
    assert_close(logits(model), logits(original))


def test_settings_of_a_newer_peft_are_kept(tmp_path: Path) -> None:
    save_theirs(theirs(small, {"target_modules": ["q_proj"]}), tmp_path)
    newer = config(tmp_path) | {"use_hyperlora": False, "auto_mapping": {"base_model_class": "S"}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(newer))
    model = fresh(small)
    with pytest.warns(UserWarning, match="LoRA does not know.*: use_hyperlora=False$"):
        PeftPlugin.from_pretrained(model, tmp_path)
    save_adapter(tmp_path / "again", model)
    written = config(tmp_path / "again")
    assert written["use_hyperlora"] is False
    assert written["auto_mapping"] == {"base_model_class": "S"}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("build", [llama, tied_llama])
def test_embeddings_that_peft_saves_whole(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    original = theirs(build, {"target_modules": ["embed_tokens", "q_proj"]})
    train(original)
    original.save_pretrained(tmp_path)
    file = load_file(tmp_path / "adapter_model.safetensors")
    assert "base_model.model.model.embed_tokens.base_layer.weight" in file
    model = fresh(build)
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    PeftPlugin.from_pretrained(model, tmp_path)
    assert_close(logits(model), logits(original))


def test_biases_that_peft_saves_twice(tmp_path: Path) -> None:
    settings = {"target_modules": ["q_proj"], "bias": "all", "modules_to_save": ["head"]}
    original = theirs(small, settings)
    train(original)
    save_theirs(original, tmp_path)
    file = load_file(tmp_path / "adapter_model.safetensors")
    assert "base_model.model.head.original_module.bias" in file
    model = fresh(small)
    PeftPlugin.from_pretrained(model, tmp_path)
    assert_close(logits(model), logits(original))


@pytest.mark.parametrize(
    "rules", [{"q_proj": 2, "1.self_attn.q_proj": 4}, {".*proj": 4, "v_proj": 3}]
)
def test_the_first_of_several_patterns_is_meant_in_a_file_of_peft(
    rules: dict[str, int], tmp_path: Path
) -> None:
    settings = {"target_modules": ["q_proj", "v_proj"], "rank_pattern": rules}
    original = theirs(llama, {**settings, "alpha_pattern": rules})
    train(original)
    save_theirs(original, tmp_path)
    # peft sorts the patterns when it writes them, so to itself they may mean something else then.
    settings = config(tmp_path) | {"rank_pattern": rules, "alpha_pattern": rules}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    model = fresh(llama)
    PeftPlugin.from_pretrained(model, tmp_path)
    assert_close(logits(model), logits(original))
    save_adapter(tmp_path / "again", model)
    again = peft.PeftModel.from_pretrained(fresh(llama), tmp_path / "again")
    assert_close(logits(again), logits(original))


def test_the_most_specific_pattern_is_meant_here_and_peft_reads_it_so(tmp_path: Path) -> None:
    rules = {"q_proj": 2, "layers.1.self_attn.q_proj": 4, ".*": 3}
    settings = {"target_modules": ["q_proj", "v_proj"], "rank_pattern": rules}
    model = ours(llama, {**settings, "alpha_pattern": rules})
    ranks = {name: p.shape[0] for name, p in model.named_parameters() if "lora_A" in name}
    assert list(ranks.values()) == [2, 3, 4, 3]
    train(model)
    save_adapter(tmp_path, model)
    loaded = peft.PeftModel.from_pretrained(fresh(llama), tmp_path)
    assert_close(logits(loaded), logits(model))


def test_adapters_of_a_bfloat16_base(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return llama().to(torch.bfloat16)

    settings = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}
    original = theirs(build, settings)
    train(original)
    save_theirs(original, tmp_path)
    model = fresh(build)
    PeftPlugin.from_pretrained(model, tmp_path)
    torch.testing.assert_close(logits(model).float(), logits(original).float(), rtol=0, atol=2e-2)
    save_adapter(tmp_path / "again", model)
    one, other = (
        load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, tmp_path / "again")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor.float(), other[name].float()) for name, tensor in one.items())


def test_an_adapter_in_a_folder_of_its_name(tmp_path: Path) -> None:
    original = theirs(small, {"target_modules": ["q_proj"]})
    original.add_adapter("other", peft.LoraConfig(target_modules=["down"], init_lora_weights=False))
    save_theirs(original, tmp_path)
    original.set_adapter("other")
    model = fresh(small)
    PeftPlugin.from_pretrained(model, tmp_path / "other", "other")
    assert_close(logits(model), logits(original))

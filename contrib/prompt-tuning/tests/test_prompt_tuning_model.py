"""Virtual tokens, against the same model given the embeddings that they stand for."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from core_plugin.adapters import (
    add_adapter,
    delete_adapter,
    disable_adapters,
    initialize,
    inject,
    set_adapter,
)
from core_plugin.builtin.decoder import Decoder
from core_plugin.errors import ConfigError
from core_plugin_prompt_tuning.plugin import PromptTuning, PromptTuningParams

IDS = torch.tensor([[1, 2, 12, 5, 5], [7, 0, 3, 3, 9]])
COUNT = 3


def llama() -> LlamaForCausalLM:
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
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=13, n_positions=32)
    return GPT2LMHeadModel(config).eval()


def decoder() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "layers": 2, "heads": 2, "initializer_std": 0.3}
    return Decoder.build(Decoder.Params(**sizes), 13)


def prompted(model: nn.Module, **settings: Any) -> nn.Module:
    torch.manual_seed(1)
    inject(model, PromptTuning, PromptTuningParams(**{"num_virtual_tokens": COUNT, **settings}))
    return model


def prompt(model: nn.Module, adapter: str = "default") -> Tensor:
    return model.prompt_encoder.prompt_embeddings[adapter]


def with_prompt(base: Any, embeddings: Tensor, ids: Tensor = IDS, **inputs: Any) -> Any:
    """What a Hugging Face model gives for the embeddings, and then the ids."""
    own = base.get_input_embeddings()(ids)
    whole = torch.cat([embeddings.expand(len(ids), -1, -1), own], dim=1)
    return base(inputs_embeds=whole, **inputs)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_logits_are_those_after_the_embeddings(build: Any) -> None:
    model, base = prompted(build()), build()
    expected = with_prompt(base, prompt(model)).logits[:, COUNT:]
    assert (expected - base(IDS).logits).abs().max() > 1e-2
    for given in ({"input_ids": IDS}, {"inputs_embeds": base.get_input_embeddings()(IDS)}):
        torch.testing.assert_close(model(**given).logits, expected)
    torch.testing.assert_close(model(IDS).logits, expected)


def test_cores_decoder_is_as_llama() -> None:
    ours = prompted(decoder())
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=ours.model.layers[0].mlp.up_proj.out_features,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=13,
        rms_norm_eps=Decoder.Params.norm_eps,
        rope_theta=Decoder.Params.rope_theta,
    )
    reference = LlamaForCausalLM(config)
    state = {n: t for n, t in ours.state_dict().items() if "prompt" not in n}
    reference.load_state_dict(state)
    expected = with_prompt(reference, prompt(ours)).logits[:, COUNT:]
    torch.testing.assert_close(ours(IDS), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_seen(side: str) -> None:
    model, base = prompted(llama()), llama()
    mask = torch.ones_like(IDS)
    mask[1, : 2 if side == "left" else -2 :] = 0
    mask[1, 2:] = 1 if side == "left" else mask[1, 2:]
    if side == "right":
        mask[1] = torch.tensor([1, 1, 1, 0, 0])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    result = model(IDS, mask, position_ids=positions).logits
    alone = with_prompt(base, prompt(model), IDS[1:, mask[1].bool()]).logits[:, COUNT:]
    torch.testing.assert_close(result[1:, mask[1].bool()], alone, rtol=1e-4, atol=1e-5)


def test_the_loss_is_that_of_the_tokens_alone() -> None:
    model, base = prompted(llama()), llama()
    labels = IDS.clone()
    labels[0, 3] = -100
    result = model(input_ids=IDS, labels=labels)
    assert result.logits.shape == (2, 5, 13)
    logits = with_prompt(base, prompt(model)).logits[:, COUNT - 1 : -1]
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(result.loss, expected)


def test_gradients_are_those_of_the_embeddings() -> None:
    model, base = prompted(llama()), llama()
    embeddings = prompt(model).detach().clone().requires_grad_()
    model(IDS).logits[:, ::2].square().sum().backward()
    with_prompt(base, embeddings).logits[:, COUNT::2].square().sum().backward()
    torch.testing.assert_close(prompt(model).grad, embeddings.grad)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == ["prompt_encoder.prompt_embeddings.default"]
    assert all(p.grad is None for n, p in model.named_parameters() if n not in trained)


def test_a_cache_holds_the_virtual_tokens_once() -> None:
    model = prompted(llama())
    whole = IDS
    for _ in range(6):
        whole = torch.cat([whole, model(whole).logits[:, -1:].argmax(-1)], dim=1)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    for use_cache in (True, False):
        mask = torch.ones_like(IDS)
        generated = model.generate(IDS, attention_mask=mask, use_cache=use_cache, **options)
        assert torch.equal(generated, whole)
    last = model(IDS, logits_to_keep=2).logits
    torch.testing.assert_close(last, model(IDS).logits[:, -2:])


def test_what_is_not_for_each_token_is_not_cut() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 13}
    config = BertConfig(**sizes, intermediate_size=16, num_labels=5 + COUNT)
    model = BertForSequenceClassification(config).eval()
    base = copy.deepcopy(model)
    prompted(model)
    types = torch.ones_like(IDS)
    expected = with_prompt(
        base, prompt(model), token_type_ids=nn.functional.pad(types, (COUNT, 0))
    ).logits
    torch.testing.assert_close(model(IDS, token_type_ids=types).logits, expected)


def test_switched_off_the_model_is_as_before() -> None:
    model, expected = prompted(decoder()), decoder()(IDS)
    with disable_adapters(model):
        assert torch.equal(model(IDS), expected)
    assert not torch.equal(model(IDS), expected)
    delete_adapter(model, "default")
    assert torch.equal(model(IDS), expected)
    assert model.state_dict().keys() == decoder().state_dict().keys()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_adapters_come_alone_or_one_after_the_other() -> None:
    model, base = prompted(llama()), llama()
    add_adapter(model, PromptTuning, PromptTuningParams(num_virtual_tokens=2), "second")
    alone = model(IDS).logits
    torch.testing.assert_close(alone, with_prompt(base, prompt(model)).logits[:, COUNT:])
    set_adapter(model, "second")
    expected = with_prompt(base, prompt(model, "second")).logits[:, 2:]
    torch.testing.assert_close(model(IDS).logits, expected)
    set_adapter(model, ["second", "default"])
    both = torch.cat([prompt(model, "second"), prompt(model)])
    torch.testing.assert_close(model(IDS).logits, with_prompt(base, both).logits[:, 2 + COUNT :])
    delete_adapter(model, "second")
    set_adapter(model, "default")
    assert torch.equal(model(IDS).logits, alone)


def test_a_copy_is_a_model_of_its_own() -> None:
    model = prompted(decoder())
    expected, other = model(IDS), copy.deepcopy(model)
    assert torch.equal(other(IDS), expected)
    nn.init.zeros_(prompt(other))
    assert not torch.equal(other(IDS), expected)
    delete_adapter(other, "default")
    assert torch.equal(other(IDS), decoder()(IDS))
    assert torch.equal(model(IDS), expected)


def test_outside_of_the_models_call_nothing_is_put_in() -> None:
    model, base = prompted(decoder()), decoder()
    embedding = model.model.embed_tokens
    assert torch.equal(embedding(IDS), base.model.embed_tokens(IDS))
    expected = model(IDS)
    failing = model.model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(IDS)
    failing.remove()
    assert torch.equal(embedding(IDS), base.model.embed_tokens(IDS))
    assert torch.equal(model(IDS), expected)


def test_the_computing_dtype_is_the_models() -> None:
    model = prompted(decoder().bfloat16())
    assert prompt(model).dtype == torch.float32
    assert model(IDS).dtype == torch.bfloat16


# torch looks for it itself, and means to hide what it says then.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_gives_the_same() -> None:
    model, traced = prompted(decoder()), prompted(decoder())
    compiled = torch.compile(traced, backend="eager", fullgraph=True)
    for ids in (IDS, IDS[:, :4]):
        torch.testing.assert_close(compiled(ids), model(ids))
    model(IDS).square().sum().backward()
    compiled(IDS).square().sum().backward()
    torch.testing.assert_close(prompt(traced).grad, prompt(model).grad)


@pytest.mark.parametrize("from_meta", [False, True])
def test_virtual_tokens_may_begin_as_tokens(from_meta: bool) -> None:
    with torch.device("meta" if from_meta else "cpu"):
        model = prompted(decoder(), prompt_tuning_init="SAMPLE_VOCAB", num_virtual_tokens=50)
    if from_meta:
        model.to_empty(device="cpu")
        model.load_state_dict(decoder().state_dict(), strict=False)
        initialize(model)
    rows = prompt(model)[:, None] == model.model.embed_tokens.weight
    assert rows.all(-1).any(-1).all()
    assert rows.all(-1).any(0).sum() > 8


def test_how_virtual_tokens_are_drawn() -> None:
    values = prompt(prompted(decoder(), num_virtual_tokens=400))
    assert values.mean().item() == pytest.approx(0, abs=0.05)
    assert values.std().item() == pytest.approx(1, abs=0.05)


class Positions(nn.Module):
    """Two embeddings outside the blocks, of which neither says that it is of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.of_tokens, self.of_places = nn.Embedding(13, 4), nn.Embedding(20, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.of_tokens(tokens) + self.of_places(torch.arange(tokens.shape[1]))


def test_models_that_cannot_have_virtual_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"one embedding of tokens.* has of_tokens, of_places"):
        prompted(Positions())
    with pytest.raises(ConfigError, match="has none"):
        prompted(nn.Linear(3, 3))
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 13}
    with pytest.raises(ConfigError, match="an encoder and a decoder"):
        prompted(T5ForConditionalGeneration(T5Config(**sizes)))
    with pytest.raises(ValueError, match="num_virtual_tokens must be at least 1, got 0"):
        PromptTuningParams(num_virtual_tokens=0)


def test_a_model_with_other_names_says_itself_what_embeds_tokens() -> None:
    torch.manual_seed(0)
    model = Positions()
    model.get_input_embeddings = lambda: model.of_tokens
    base = copy.deepcopy(model)
    prompted(model)
    places = base.of_places(torch.arange(COUNT, COUNT + 5))
    assert torch.equal(model(IDS), base.of_tokens(IDS) + places)
    assert torch.equal(model(tokens=IDS), base.of_tokens(IDS) + places)

import math

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from core_plugin import ConfigError
from core_plugin.types import ModelPlugin

VOCABULARY = 61
decoder = ModelPlugin("decoder")


def make_params(**config):
    small = {"hidden_size": 32, "layers": 2, "heads": 4}
    return decoder.parse_params({**small, **config}, decoder.params_type())


def describe(**config):
    with torch.device("meta"):
        return decoder.build(make_params(**config), VOCABULARY)


def initialize(model, seed=0):
    torch.manual_seed(seed)
    for module in model.modules():
        if list(module.parameters(recurse=False)) or list(module.buffers(recurse=False)):
            decoder.initialize(module)
    return model


def make(**config):
    return initialize(describe(**config).to_empty(device="cpu"))


def tokens(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, shape, generator=generator)


def batch(input_ids):
    labels = input_ids.roll(-1, 1)
    labels[:, -1] = -100
    return {"input_ids": input_ids, "labels": labels}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"key_value_heads": 2},
        {"key_value_heads": 1, "tie_embeddings": True},
        {"intermediate_size": 48, "rope_theta": 500.0, "norm_eps": 1e-3},
    ],
    ids=["heads", "grouped", "tied", "sizes"],
)
def test_logits_and_gradients_equal_those_of_transformers(config):
    from transformers import LlamaConfig, LlamaForCausalLM

    params = make_params(**config)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=params.hidden_size,
            num_hidden_layers=params.layers,
            num_attention_heads=params.heads,
            num_key_value_heads=params.key_value_heads or params.heads,
            intermediate_size=params.intermediate_size or 128,
            rope_theta=params.rope_theta,
            rms_norm_eps=params.norm_eps,
            tie_word_embeddings=params.tie_embeddings,
        )
    )
    ours = make(initializer_std=0.3, **config)
    theirs.load_state_dict(ours.state_dict())
    input_ids = tokens(2, 17)
    expected = theirs(input_ids).logits
    torch.testing.assert_close(ours(input_ids), expected, rtol=1e-4, atol=1e-5)

    loss = decoder.loss(ours, batch(input_ids))
    loss.backward()
    flat = expected[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(flat, input_ids[:, 1:].flatten(), reduction="sum").backward()
    mine, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert mine.keys() == other.keys()
    for name, parameter in mine.items():
        torch.testing.assert_close(
            parameter.grad,
            other[name].grad,
            rtol=1e-3,
            atol=1e-4,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_it_is_described_without_memory_or_random_numbers():
    before = torch.get_rng_state()
    model = describe()
    assert all(p.is_meta for p in model.parameters())
    assert list(model.buffers()) == []
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_filled_at_its_scale(tied):
    model = describe(hidden_size=128, layers=8, initializer_std=0.5, tie_embeddings=tied)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    initialize(model)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.5 / math.sqrt(16) if residual else 0.5
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.05 * std, name


@pytest.mark.parametrize("move", [lambda m: m, lambda m: m.to_empty(device="cpu").double()])
def test_tied_embeddings_are_one_parameter_wherever_the_model_goes(move):
    model = move(describe(tie_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= model.state_dict().keys()
    untied = sum(p.numel() for p in describe().parameters())
    assert sum(p.numel() for p in model.parameters()) == untied - VOCABULARY * 32


def test_a_position_sees_itself_and_what_is_before_it_alone():
    model = make(initializer_std=0.3)
    input_ids = tokens(1, 12)
    changed = input_ids.clone()
    changed[0, 7] = (changed[0, 7] + 1) % VOCABULARY
    before, after = model(input_ids), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert ((before - after)[0, 7:].abs().amax(dim=-1) > 1e-3).all()


def test_positions_count_by_their_distance():
    model = make(initializer_std=0.3, layers=1)
    first, *rest = tokens(8).tolist()
    order = model(torch.tensor([[first, *rest]]))[0, -1]
    swapped = model(torch.tensor([[rest[0], first, *rest[1:]]]))[0, -1]
    assert not torch.allclose(order, swapped, atol=1e-4)


def test_blocks_are_the_layers_in_order():
    model = describe(layers=3)
    names = {module: name for name, module in model.named_modules()}
    assert [names[b] for b in decoder.blocks(model)] == [f"model.layers.{n}" for n in range(3)]


def test_it_runs_under_autocast():
    model = make(key_value_heads=2)
    input_ids = tokens(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        loss = decoder.loss(model, batch(input_ids))
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, decoder.loss(model, batch(input_ids)), rtol=0.02, atol=0)


def test_it_compiles_to_one_graph():
    model = make(key_value_heads=2)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    input_ids = tokens(2, 9)
    torch.testing.assert_close(compiled(input_ids), model(input_ids))


@pytest.mark.parametrize("tied", [False, True])
def test_it_is_materialized_after_it_was_sharded(tied, one_process_group):
    expected = make(tie_embeddings=tied)
    model = describe(tie_embeddings=tied)
    mesh = init_device_mesh("cpu", (1,))
    for block in [*decoder.blocks(model), model]:
        fully_shard(block, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            mine.to_local().copy_(other)
    input_ids = tokens(2, 9)
    for each in (model, expected):
        decoder.loss(each, batch(input_ids)).backward()
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad)


@pytest.fixture
def one_process_group():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_weights_are_a_file_or_all_files_of_a_directory(tmp_path):
    for name in ("b", "a"):
        save_file({"x": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    (tmp_path / "config.json").write_text("{}")
    a, b = str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")
    assert list(decoder.weights(make_params())) == []
    assert list(decoder.weights(make_params(weights=b))) == [b]
    assert list(decoder.weights(make_params(weights=str(tmp_path)))) == [a, b]


@pytest.mark.parametrize("name", ["absent", "empty", "model.bin"])
def test_weights_that_are_not_there_are_named(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.bin").touch()
    with pytest.raises(ConfigError, match=rf"^model\.weights: .*{name} (does not|is neither)"):
        decoder.weights(make_params(weights=str(tmp_path / name)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"layers": -1}, "layers must be at least 1, got -1"),
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"key_value_heads": 0}, "key_value_heads must be at least 1, got 0"),
        ({"intermediate_size": 0}, "intermediate_size must be at least 1, got 0"),
        ({"rope_theta": 0}, "rope_theta must be above 0, got 0"),
        ({"norm_eps": -1e-5}, r"norm_eps must be in \[0, 1\), got -1e-05"),
        ({"initializer_std": 0}, "initializer_std must be above 0, got 0"),
        ({"hidden_size": 36}, r"hidden_size must be a multiple of twice heads \(8\), got 36"),
        ({"key_value_heads": 3}, r"key_value_heads must divide heads \(4\), got 3"),
    ],
)
def test_sizes_out_of_range_are_named(config, message):
    with pytest.raises(ConfigError, match=message):
        make_params(**config)


def test_all_ranges_are_reported_at_once():
    with pytest.raises(ConfigError, match=r"layers .* got 0\n.*norm_eps .* got 2"):
        make_params(layers=0, norm_eps=2)

"""Repeated blocks: which modules they are, and that recomputing and compiling changes no number."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core_plugin import config
from core_plugin.adapters import inject
from core_plugin.builtin.decoder import Decoder
from core_plugin.errors import ConfigError
from core_plugin.training import blocks
from core_plugin.types import PeftPlugin


class Block(nn.Module):
    """Attention and a feed-forward part, with dropout."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.qkv = nn.Linear(size, 3 * size)
        self.feed = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, *, scale=1.0):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(-3)
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        x = x + self.dropout(mixed.transpose(1, 2).flatten(2))
        return x + scale * self.dropout(self.feed(x))


class Net(nn.Module):
    """Its head is tied to the embedding, and the first block is frozen."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[0].requires_grad_(False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


def net(layers: int = 4) -> Net:
    torch.manual_seed(0)
    return Net(layers)


def run_config(**train):
    return config.resolve({"data": {"name": "text", "path": "x"}, "train": {"steps": 1} | train})


def with_lora(model: nn.Module) -> nn.Module:
    lora = PeftPlugin("lora").resolve()
    inject(model, lora, lora.Params(r=2, target_modules=["qkv", "feed.0"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def step(model: nn.Module, seed: int = 1):
    """The loss and the gradients, with dropout."""
    torch.manual_seed(seed)
    ids = torch.randint(0, 11, (3, 8))
    loss = model.train()(ids).logsumexp(-1).square().sum()
    model.zero_grad()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_step(changed: nn.Module, plain: nn.Module, tolerance: float = 0.0) -> None:
    (loss, gradients), (wanted, wanted_gradients) = step(changed), step(plain)
    assert abs(loss - wanted) <= tolerance * abs(wanted)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in wanted_gradients.items():
        assert torch.dist(gradients[name], gradient) <= tolerance * gradient.norm(), name


# Which they are


def test_blocks_are_those_that_are_named_or_of_the_architecture_or_found():
    with torch.device("meta"):
        decoder = Decoder.build(Decoder.Params(layers=3), 50)
    layers = list(decoder.model.layers)
    assert blocks.repeated_blocks(run_config(), decoder) == layers
    named = run_config(blocks=["Attention"])
    assert blocks.repeated_blocks(named, decoder) == [layer.self_attn for layer in layers]
    assert blocks.repeated_blocks(run_config(blocks=[]), decoder) == []
    both = run_config(blocks=["Attention", "FeedForward"])
    parts = [part for layer in layers for part in (layer.self_attn, layer.mlp)]
    assert blocks.repeated_blocks(both, decoder) == parts


def test_the_largest_class_that_repeats_in_a_list_is_found():
    model = net()
    assert blocks.find(model) == list(model.layers)
    mixed = nn.Sequential(nn.Linear(16, 16), Block(), Block(), nn.Linear(16, 2))
    assert blocks.find(mixed) == [mixed[1], mixed[2]]
    two_lists = nn.ModuleDict({"encoder": net(), "decoder": net()})
    assert blocks.find(two_lists) == [*two_lists["encoder"].layers, *two_lists["decoder"].layers]
    stages = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
    assert blocks.find(nn.ModuleDict({"stages": stages})) == list(stages)
    one = nn.ModuleDict({"layers": nn.ModuleList([Block()]), "head": nn.Linear(2, 2)})
    assert blocks.find(one) == [one["layers"][0]]
    shared = Block()
    assert blocks.find(nn.Sequential(shared, nn.Linear(2, 2), shared)) == [shared]


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
        nn.ModuleDict({"parts": nn.ModuleList(nn.Sequential(nn.ReLU()) for _ in range(2))}),
        nn.ModuleDict({"blocks": nn.ModuleList()}),
        nn.ModuleDict({"one": Block(), "two": Block()}),
    ],
)
def test_nothing_is_found_where_no_class_with_parameters_repeats_in_a_list(model):
    assert blocks.find(model) == []


def test_blocks_are_found_within_wrappers_and_adapters():
    model = with_lora(net())
    for number, block in enumerate(model.layers):
        model.layers[number] = (
            checkpoint_wrapper(block) if number % 2 else torch.compile(block, backend="eager")
        )
    layers = list(model.layers)
    assert blocks.find(model) == layers
    assert blocks.repeated_blocks(run_config(blocks=["Block"]), model) == layers
    assert {blocks.class_name(block) for block in layers} == {"Block"}
    linear = blocks.repeated_blocks(run_config(blocks=["Linear"]), model)
    assert len(linear) == 3 * 4 + 1
    assert "Block (4)" in blocks.candidates(model)


def test_names_of_no_class_or_of_nested_blocks_are_told_with_their_line(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "data: {name: text, path: x}\n"
        "train:\n  steps: 1\n  blocks: [Blok, Xyzzy, Sequential, Block]\n"
    )
    with pytest.raises(ConfigError) as caught:
        blocks.repeated_blocks(config.load(file), net())
    misspelt, unknown, nested = caught.value.faults
    assert f"{file}:4: train.blocks: no module of Net is a Blok; did you mean Block?" in misspelt
    assert "is a Xyzzy; candidates: Linear (13), Block (4), Sequential (4)" in unknown
    assert "each Sequential is inside another block" in nested


# Recomputing


class Peak(TorchDispatchMode):
    """The most bytes that are held at once of what is made in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.most = 0
        self._known: weakref.WeakSet = weakref.WeakSet()

    def _free(self, size: int) -> None:
        self.held -= size

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self._known:
                storage = tensor.untyped_storage()
                self._known.add(storage)
                self.held += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.most = max(self.most, self.held)
        return out


def peak(model: nn.Module) -> int:
    ids = torch.randint(0, 11, (8, 32))
    with Peak() as measured:
        loss = model(ids).square().sum()
        loss.backward()
    return measured.most


@pytest.mark.parametrize("what", ["full", "selective", 2])
@pytest.mark.parametrize("change", [lambda model: model, with_lora], ids=["plain", "lora"])
def test_recomputing_changes_no_bit_and_no_name(what, change):
    plain, recomputed = change(net()), change(net())
    found = blocks.find(recomputed)
    blocks.prepare(run_config(activation_checkpointing=what), recomputed, found)
    assert_same_step(recomputed, plain)
    assert [(n, type(m)) for n, m in recomputed.named_modules()] == [
        (n, type(m)) for n, m in plain.named_modules()
    ]
    assert list(recomputed.state_dict()) == list(plain.state_dict())


def test_recomputing_more_holds_less_memory():
    peaks = {}
    for what in ("none", 3, 2, "selective", "full"):
        model = net(6)
        blocks.prepare(run_config(activation_checkpointing=what), model, blocks.find(model))
        peaks[what] = peak(model)
    assert peaks["full"] < 0.5 * peaks["none"]
    assert peaks["full"] < peaks["selective"] < peaks["none"]
    assert peaks["full"] < peaks[2] < peaks[3] < peaks["none"]


def test_a_number_recomputes_every_nth_block():
    model = net(6)
    blocks.prepare(run_config(activation_checkpointing=3), model, blocks.find(model))
    assert ["forward" in vars(block) for block in model.layers] == [False, False, True] * 2


def test_a_copy_of_a_recomputed_block_computes_with_its_own_parameters():
    model = net()
    blocks.recompute(blocks.find(model))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.zero_()
    assert_same_step(copied, net())


def test_a_forward_that_a_block_has_of_its_own_is_what_is_recomputed():
    changed, plain = net(), net()
    for model in (changed, plain):
        for block in model.layers:
            block.forward = lambda x, block=block, **_: x * block.feed[0].weight.mean()
    blocks.recompute(changed.layers)
    assert_same_step(changed, plain)


def test_what_calls_no_gradients_is_the_same():
    plain, recomputed = net().eval(), net().eval()
    blocks.recompute(blocks.find(recomputed), "selective")
    with torch.no_grad():
        ids = torch.arange(8)[None]
        assert torch.equal(recomputed(ids), plain(ids))


# Compiling


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile's own
@pytest.mark.parametrize("what", ["none", "full", "selective"])
@pytest.mark.parametrize("change", [lambda model: model, with_lora], ids=["plain", "lora"])
def test_compiled_blocks_share_their_code_and_compute_the_same(what, change):
    torch._dynamo.reset()
    plain, compiled = change(net(12)).double(), change(net(12)).double()
    found = blocks.find(compiled)
    blocks.prepare(run_config(activation_checkpointing=what), compiled, found)
    counter = CompileCounterWithBackend("aot_eager")
    blocks.compile_each(found, counter)
    assert_same_step(compiled, plain, tolerance=1e-9)
    # one for the frozen block, or the frozen input of the first, and one for all others
    assert counter.frame_count == 2
    assert list(compiled.state_dict()) == list(plain.state_dict())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counter, "frame_count", 0)
        assert_same_step(copy.deepcopy(compiled), plain, tolerance=1e-9)


# What cannot be done


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("activation_checkpointing: full", r"is for repeated blocks, and Linear has none; name"),
        ("compile: aot_eager", r"is for repeated blocks, and Linear has none; .*Candidates: none"),
    ],
)
def test_no_blocks_are_an_error_where_they_are_asked_for(tmp_path: Path, train, message):
    file = tmp_path / "run.yaml"
    file.write_text(f"data: {{name: text, path: x}}\ntrain:\n  steps: 1\n  {train}\n")
    run, model = config.load(file), nn.Linear(2, 2)
    key = train.partition(":")[0]
    with pytest.raises(ConfigError, match=rf"run.yaml:4: train\.{key}: {message}"):
        blocks.prepare(run, model, blocks.find(model))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"compile": "aot_egger"}, "no backend 'aot_egger'; did you mean aot_eager"),
        ({"compile": "xyzzy"}, "no backend 'xyzzy'; there are .*inductor"),
        ({"activation_checkpointing": 5}, "is 5, and the model has 4 blocks: none would be"),
    ],
)
def test_what_could_not_be_done_is_refused(train, message):
    model = net()
    with pytest.raises(ConfigError, match=message):
        blocks.prepare(run_config(**train), model, blocks.find(model))

"""Values of another adapter in the place of a LoRA adapter's, also in a compiled model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from core_plugin.adapters import hotswap, inject, load_adapter, save_adapter
from core_plugin.errors import CheckpointError
from core_plugin_lora.plugin import LoRA, LoRAParams


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(3, 6, 4))
        self.down_proj = nn.Parameter(torch.randn(3, 4, 6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(torch.einsum("eoi,bsi->ebso", self.up_proj, x))
        return torch.einsum("eoi,ebsi->bso", self.down_proj, hidden)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.grouped = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.experts = Experts()
        self.head = nn.Linear(4, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.linear(self.tokens(tokens)))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.grouped(torch.tanh(self.conv(x.mT))).mT
        return self.head(x + self.experts(x))


INPUT = torch.arange(14).view(2, 7) % 7
EVERYTHING = {
    "target_modules": ["tokens", "linear", "attention", "conv", "grouped", "head"],
    "target_parameters": ["experts.up_proj", "experts.down_proj"],
}
MATRICES = {"target_modules": ["tokens", "linear", "conv", "head"]}
PLAIN = {"target_modules": ["linear", "head"]}


def model(seed: int, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    m = Model().eval()
    inject(m, LoRA, LoRAParams(**{"r": 4, "lora_alpha": 4, **settings}))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in m.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return m


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (EVERYTHING, EVERYTHING),
        (MATRICES, {**MATRICES, "r": 2, "lora_alpha": 7}),
        (MATRICES, {**MATRICES, "r": 2, "use_rslora": True}),
        (MATRICES, {"target_modules": ["linear", "conv"], "r": 2}),
        (MATRICES, {**MATRICES, "rank_pattern": {"linear": 3}, "alpha_pattern": {"conv": 9}}),
        ({**PLAIN, "rank_pattern": {"linear": 6}}, {**PLAIN, "r": 3}),
        ({**PLAIN, "lora_bias": True}, {**PLAIN, "lora_bias": True, "r": 1, "lora_alpha": 2}),
        ({**MATRICES, "use_dora": True}, {**MATRICES, "use_dora": True, "r": 2, "lora_alpha": 3}),
        ({**PLAIN, "bias": "all"}, {**PLAIN, "bias": "all", "r": 2}),
        (PLAIN, {**PLAIN, "lora_dropout": 0.5, "init_lora_weights": "gaussian"}),
    ],
)
def test_the_adapter_does_what_the_other_did(
    ours: dict[str, Any], theirs: dict[str, Any], tmp_path: Path
) -> None:
    other, m = model(2, **theirs), model(1, **ours)
    save_adapter(tmp_path / "other", other)
    tensors = dict(m.named_parameters())
    hotswap(m, tmp_path / "other")
    torch.testing.assert_close(m(INPUT), other(INPUT), rtol=1e-5, atol=1e-5)
    assert all(parameter is tensors[name] for name, parameter in m.named_parameters())
    save_adapter(tmp_path / "again", m)
    again = model(3, **ours)
    load_adapter(again, tmp_path / "again")
    torch.testing.assert_close(again(INPUT), m(INPUT))


@pytest.mark.parametrize("extra", [{}, {"use_dora": True}, {"lora_bias": True}])
def test_a_compiled_model_is_not_compiled_again(extra: dict[str, Any], tmp_path: Path) -> None:
    torch._dynamo.reset()
    other = model(2, **PLAIN, **extra, r=2, lora_alpha=9)
    save_adapter(tmp_path, other)
    m, counter = model(1, **PLAIN, **extra), CompileCounter()
    compiled = torch.compile(m, backend=counter)
    with torch.no_grad():
        compiled(INPUT)
        frames = counter.frame_count
        assert frames > 0
        hotswap(m, tmp_path)
        torch.testing.assert_close(compiled(INPUT), other(INPUT), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == frames


@pytest.mark.parametrize(
    ("ours", "theirs", "fault"),
    [
        (PLAIN, {**PLAIN, "r": 5}, "linear: r is 5, and at most 4 has room in the model"),
        (EVERYTHING, {**EVERYTHING, "r": 2}, "attention: r is 2, and 4 in the model"),
        (PLAIN, {**PLAIN, "lora_bias": True}, "linear: lora_bias is True, and False in the model"),
        (PLAIN, {**PLAIN, "use_dora": True}, "linear: use_dora is True, and False in the model"),
        ({"target_modules": ["head"]}, PLAIN, "linear.lora_A.weight: unexpected"),
        (
            {**PLAIN, "use_dora": True},
            {"target_modules": ["head"], "use_dora": True},
            "linear: it has no tensors for this layer, whose adapter has use_dora",
        ),
        (PLAIN, {**PLAIN, "init_lora_weights": "pissa"}, "linear: init_lora_weights is 'pissa'"),
    ],
)
def test_what_does_not_fit_is_refused(
    ours: dict[str, Any], theirs: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    save_adapter(tmp_path, model(2, **theirs))
    m = model(1, **ours)
    before = {name: tensor.clone() for name, tensor in m.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        hotswap(m, tmp_path)
    assert fault in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in m.state_dict().items())

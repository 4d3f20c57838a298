"""Whole models: token ids ``[batch, sequence]`` to logits ``[batch, sequence, vocabulary]``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from core_plugin.builtin.decoder import Decoder
from core_plugin.testing.peft.bases import HEADS, WIDTH, Experts

VOCABULARY = 11
TARGETS = {
    "Linear": ["up", "down"],
    "Embedding": ["embedding"],
    "Conv1d": ["line"],
    "Conv2d": ["plane"],
    "Conv3d": ["space"],
    "MultiheadAttention": ["attention"],
}
"""The names in :class:`Network` of the layers of each type."""
TARGET_PARAMETERS = ["experts.weight"]


class Block(nn.Module):
    """A layer of each type, each on the residual stream ``[batch, sequence, width]``."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)
        self.line = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.plane = nn.Conv2d(WIDTH, WIDTH, (3, 1), padding=(1, 0))
        self.space = nn.Conv3d(WIDTH, WIDTH, (3, 1, 1), padding=(1, 0, 0))
        self.experts = Experts(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after each of them."""
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.down(torch.tanh(self.up(x)))
        image = x.transpose(1, 2)
        image = image + self.line(image)
        image = image + torch.tanh(self.plane(image[..., None]))[..., 0]
        image = image + torch.tanh(self.space(image[..., None, None]))[..., 0, 0]
        x = image.transpose(1, 2)
        return x + self.experts(x)  # type: ignore[no-any-return]


class Network(nn.Module):
    """Two blocks between an embedding and a head.

    Args:
        tied: Whether the head has the embedding's weight.
        shared: Whether both blocks have the same layers ``up``, ``line`` and ``experts``.
    """

    def __init__(self, *, tied: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        first, second = Block(), Block()
        self.blocks = nn.ModuleList([first, second])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if shared:
            second.up, second.line, second.experts = first.up, first.line, first.experts

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def decoder(*, tied: bool = False) -> nn.Module:
    """A small one of core's own architecture."""
    sizes = Decoder.Params(
        hidden_size=WIDTH,
        layers=2,
        heads=2,
        key_value_heads=1,
        intermediate_size=16,
        tie_embeddings=tied,
        initializer_std=0.5,
    )
    return Decoder.build(sizes, VOCABULARY)


def blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The repeated blocks of either of them."""
    return list(model.blocks) if isinstance(model, Network) else Decoder.blocks(model)

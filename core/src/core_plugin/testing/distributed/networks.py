"""The networks that are spread: token ids ``[batch, sequence]`` to logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

VOCABULARY = 7
"""The rows of the embedding, which no number of ranks from 2 to 4 divides."""
WIDTH = 6
SEQUENCE = 5


class Positions(nn.Module):
    """Adds a number of its own to each place, from a buffer that is in no state dict."""

    table: Tensor
    strength: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(SEQUENCE, WIDTH), persistent=False)
        self.register_buffer("strength", torch.empty(1))

    def reset_parameters(self) -> None:
        """Compute the buffers."""
        place = torch.arange(SEQUENCE * WIDTH, dtype=torch.float64).view(SEQUENCE, WIDTH)
        self.table.copy_(torch.cos(place))
        self.strength.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        """The stream with the places' numbers."""
        return x + (self.strength * self.table).to(x.dtype)


class Adapted(nn.Module):
    """A frozen linear layer, and a low-rank update in float32."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.narrow = nn.Parameter(torch.empty(3, inputs))
        self.widen = nn.Parameter(torch.empty(outputs, 3))

    def reset_parameters(self) -> None:
        """Draw the update."""
        nn.init.normal_(self.narrow, std=0.5)
        nn.init.normal_(self.widen, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Linear, plus the update, which is computed in a dtype of its own."""
        update = x.to(self.narrow.dtype) @ self.narrow.T @ self.widen.T
        return self.base(x) + update.to(x.dtype)  # type: ignore[no-any-return]


class Block(nn.Module):
    """A residual block. It notes in which dtype it computes."""

    computed: torch.dtype | None = None

    def __init__(self, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = linear(WIDTH, 10)
        self.down = linear(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after the block."""
        hidden = self.up(self.norm(x))
        self.computed = hidden.dtype
        return x + self.down(torch.tanh(hidden))  # type: ignore[no-any-return]


class Network(nn.Module):
    """Two blocks between an embedding and a head.

    Args:
        linear: What the blocks' linear layers are.
        vocabulary: The rows of the embedding and of the head.
        bias: Whether the head has a bias.
    """

    def __init__(
        self,
        linear: Callable[[int, int], nn.Module] = nn.Linear,
        vocabulary: int = VOCABULARY,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.positions = Positions()
        self.blocks = nn.ModuleList([Block(linear), Block(linear)])
        self.head = nn.Linear(WIDTH, vocabulary, bias=bias)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``[batch, sequence, vocabulary]``."""
        x = self.positions(self.embedding(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def _plain() -> Network:
    return Network().double()


def _tied() -> Network:
    model = Network().double()
    model.head.weight = model.embedding.weight
    return model


def _frozen() -> Network:
    """The embedding and the first block are frozen, so that it begins and ends in a block."""
    model = Network().double()
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].get_submodule("up").requires_grad_(False)
    return model


def _adapted() -> Network:
    """A frozen base in bfloat16, and updates in float32 that are trained."""
    model = Network(Adapted)
    for name, parameter in model.named_parameters():
        if not name.endswith(("narrow", "widen")):
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def _two_dtypes() -> Network:
    """As the one with updates, and the norms are trained in bfloat16 beside them."""
    model = _adapted()
    for block in model.blocks:
        block.get_submodule("norm").requires_grad_(True)
    return model


KINDS: dict[str, Callable[[], Network]] = {
    "plain": _plain,
    "tied": _tied,
    "frozen": _frozen,
    "adapted": _adapted,
    "two_dtypes": _two_dtypes,
    "single_precision": Network,
    "with_a_bias": lambda: Network(bias=True).double(),
    "wider": lambda: Network(vocabulary=VOCABULARY + 1).double(),
}
"""The networks by what cases call them."""


def on_meta(kind: str) -> Network:
    """A network on ``meta``."""
    with torch.device("meta"):
        return KINDS[kind]()


def initialize(module: nn.Module) -> None:
    """Fill what a module owns itself; see ``BaseModel.initialize``."""
    module.reset_parameters()  # type: ignore[operator]

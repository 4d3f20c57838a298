"""The modules of the architecture ``decoder``.

Sources: rotary embeddings, arXiv:2104.09864; grouped-query attention, arXiv:2305.13245; SwiGLU,
arXiv:2002.05202; RMSNorm, arXiv:1910.07467; the scale of the residual projections, GPT-2. The
names and layout of the parameters, and the rotation of the two halves of a head instead of
neighbouring pairs, are those of ``LlamaForCausalLM`` in Hugging Face transformers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from core_plugin.builtin.decoder import Decoder


class Projection(nn.Linear):
    """A linear layer without bias, whose initial weights are normal."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        self.std = std  # first, since nn.Linear's constructor calls reset_parameters
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Fill the weight."""
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """Token embeddings, whose initial values are normal."""

    def __init__(self, tokens: int, size: int, std: float) -> None:
        self.std = std
        super().__init__(tokens, size)

    def reset_parameters(self) -> None:
        """Fill the weight."""
        nn.init.normal_(self.weight, std=self.std)


def rotary(
    length: int, head_size: int, theta: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[length, head_size / 2]``, float32.

    They are made anew in each forward pass: a few small operations, against a buffer that a
    materialisation from ``meta`` leaves unfilled, or a cache that keeps another mode's tensors.
    """
    exponents = torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = positions[:, None] * (1.0 / theta**exponents)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the halves of each head ``[..., sequence, head_size]`` by the angles of its position."""
    first, second = x.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key and value head."""

    def __init__(self, params: Decoder.Params) -> None:
        super().__init__()
        hidden, std = params.hidden_size, params.initializer_std
        key_value_heads = params.key_value_heads or params.heads
        self.head_size = hidden // params.heads
        self.grouped = key_value_heads != params.heads
        self.q_proj = Projection(hidden, hidden, std)
        self.k_proj = Projection(hidden, key_value_heads * self.head_size, std)
        self.v_proj = Projection(hidden, key_value_heads * self.head_size, std)
        self.o_proj = Projection(hidden, hidden, std / math.sqrt(2 * params.layers))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``[batch, sequence, hidden]`` to the same shape."""
        heads = (*x.shape[:-1], -1, self.head_size)
        q = rotate(self.q_proj(x).view(heads).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(heads).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, params: Decoder.Params) -> None:
        super().__init__()
        hidden, std = params.hidden_size, params.initializer_std
        inner = params.inner_size
        self.gate_proj = Projection(hidden, inner, std)
        self.up_proj = Projection(hidden, inner, std)
        self.down_proj = Projection(inner, hidden, std / math.sqrt(2 * params.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, sequence, hidden]`` to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A block: attention, then feed-forward, each on a norm and added to the residual stream."""

    def __init__(self, params: Decoder.Params) -> None:
        super().__init__()
        self.self_attn = Attention(params)
        self.mlp = FeedForward(params)
        self.input_layernorm = nn.RMSNorm(params.hidden_size, params.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(params.hidden_size, params.norm_eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``[batch, sequence, hidden]`` to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Everything but the output projection."""

    def __init__(self, params: Decoder.Params, vocabulary_size: int) -> None:
        super().__init__()
        self.head_size = params.hidden_size // params.heads
        self.theta = params.rope_theta
        self.embed_tokens = Embedding(vocabulary_size, params.hidden_size, params.initializer_std)
        self.layers = nn.ModuleList(Layer(params) for _ in range(params.layers))
        self.norm = nn.RMSNorm(params.hidden_size, params.norm_eps)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[batch, sequence]`` to ``[batch, sequence, hidden]``."""
        cos, sin = rotary(input_ids.shape[1], self.head_size, self.theta, input_ids.device)
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)  # type: ignore[no-any-return]


class CausalLM(nn.Module):
    """The model: token ids to the logits of the token that follows each."""

    def __init__(self, params: Decoder.Params, vocabulary_size: int) -> None:
        super().__init__()
        self.model = Stack(params, vocabulary_size)
        self.lm_head = Projection(params.hidden_size, vocabulary_size, params.initializer_std)
        if params.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[batch, sequence]`` to ``[batch, sequence, vocabulary]``."""
        return self.lm_head(self.model(input_ids))  # type: ignore[no-any-return]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> CausalLM:
        tied = self.lm_head.weight is self.model.embed_tokens.weight
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # torch replaces each module's parameter by one of its own on the way from meta to a device
        if tied and self.lm_head.weight is not self.model.embed_tokens.weight:
            self.lm_head.weight = self.model.embed_tokens.weight
        return self

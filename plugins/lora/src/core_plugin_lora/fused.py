"""A frozen linear layer and its one adapter as a single operation of autograd.

The result is added to in place, forwards and backwards, and nothing is kept for the backward pass
but the input and its product with A; with dropout, also a mask.

It is what runs wherever nothing can tell it from calling the modules one after another. With
adapters of rank 16 on all linear layers of a Llama of width 512, 4 sequences of 256 tokens and one
thread of a CPU, a step takes 1.09 times as long as without them, and called one after another 1.14;
resident memory grows by 490 MiB for 560. With dropout a step takes 1.33 for 1.31, and 349 MiB are
kept for 517.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules import module as all_modules

MANY = 256
"""From so many tokens on, a product with few rows and its transpose take less time than one with
few columns: with 1024, 512 outputs and rank 16, 0.24 ms for 0.43 on a CPU.
"""


class Parts(NamedTuple):
    """What is computed with, settled when adapters change."""

    base: nn.Module
    down: nn.Module
    up: nn.Module
    transposed: bool
    """Whether the base's weight is ``[in, out]``."""
    scaling: float
    dropout: float


def fits(x: Tensor, parts: Parts) -> bool:
    """Whether nothing can tell: no hook, no transform, no tensor of another kind."""
    weight = parts.base._parameters.get("weight")
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and type(weight) is nn.Parameter
        and not weight.requires_grad
        and type(parts.down._parameters["weight"]) is nn.Parameter
        and type(parts.up._parameters["weight"]) is nn.Parameter
        and _has_dtype(x, weight.dtype)
        and _is_untouched(parts.base)
        and _is_untouched(parts.down)
        and _is_untouched(parts.up)
        and not all_modules._has_any_global_hook()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def _has_dtype(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether autocast would take the dtypes as they are, or cast both."""
    if torch.is_autocast_enabled(x.device.type):
        return x.is_floating_point() and x.dtype != torch.float64 and dtype != torch.float64
    return x.dtype == dtype


def _is_untouched(module: nn.Module) -> bool:
    """Whether calling a module does no more than its class's forward."""
    return not (
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or "forward" in module.__dict__
    )


def linear(x: Tensor, parts: Parts, training: bool) -> Tensor:
    """``x Wᵀ + bias + scaling · (dropout(x) Aᵀ) Bᵀ``: from ``[..., in]`` to ``[..., out]``."""
    kind, shape, base = x.device.type, x.shape, cast("dict[str, Tensor]", parts.base._parameters)
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    bias = base.get("bias")
    arguments = (
        x if len(shape) == 2 else x.reshape(-1, shape[-1]),
        base["weight"].t() if parts.transposed else base["weight"],
        None if bias is None else _cast(bias, x.dtype),
        _cast(cast("Tensor", parts.down._parameters["weight"]), x.dtype),
        _cast(cast("Tensor", parts.up._parameters["weight"]), x.dtype),
        parts.scaling,
        parts.dropout if training else 0.0,
    )
    if torch.is_grad_enabled():
        result = cast("Tensor", _Linear.apply(*arguments))  # type: ignore[no-untyped-call]
    else:
        result, _, _ = _forward(*arguments)
    return result if len(shape) == 2 else result.view(*shape[:-1], result.shape[-1])


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, which takes longer to find that there is nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The result, the product with A, and what dropout kept."""
    mask, seen = None, x
    if dropout:
        seen, mask = torch.native_dropout(x, dropout, train=True)
    narrow = F.linear(seen, down)
    result = F.linear(x, _cast(weight, x.dtype), bias)
    # Selective recomputation, which is a mode, keeps products and must find them as they were.
    add = torch.addmm if torch._C._len_torch_dispatch_stack() else Tensor.addmm_
    return add(result, narrow, up.t(), alpha=scaling), narrow, mask


class _Linear(torch.autograd.Function):
    """The tensors are in the dtype of ``x``, but for the weight, whose copy would be large."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scaling: float,
        dropout: float,
    ) -> Tensor:
        result, narrow, mask = _forward(x, weight, bias, down, up, scaling, dropout)
        trained = any(ctx.needs_input_grad[3:5])
        ctx.save_for_backward(x if trained else None, weight, down, up, narrow, mask)
        ctx.scaling, ctx.kept = scaling, 1 - dropout
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up, narrow, mask = ctx.saved_tensors
        of_x, _, of_bias, of_down, of_up, _, _ = ctx.needs_input_grad
        scaling, kept = ctx.scaling, ctx.kept
        grad_x = grad_bias = grad_down = grad_up = None
        if of_down or of_up:
            seen = x if mask is None else x * mask
            if torch.is_grad_enabled():  # the gradients' own gradients go through it too
                narrow = F.linear(seen, down) / kept
        if of_x or of_down:
            grad_narrow = torch.mm(grad, up)
        if of_x:
            grad_x = torch.mm(grad, _cast(weight, grad.dtype))
            if mask is None:
                grad_x = grad_x.addmm_(grad_narrow, down, alpha=scaling)
            else:
                through = torch.mm(grad_narrow, down)
                grad_x = grad_x.addcmul_(through, mask, value=scaling / kept)
        # With beta=0 the first operand gives only its shape, and the factor costs nothing.
        if of_down:
            grad_down = torch.addmm(down, grad_narrow.t(), seen, beta=0, alpha=scaling / kept)
        if of_up and len(grad) < MANY:
            grad_up = torch.addmm(up, grad.t(), narrow, beta=0, alpha=scaling)
        elif of_up:
            grad_up = torch.addmm(up.t(), narrow.t(), grad, beta=0, alpha=scaling).t()
        if of_bias:
            grad_bias = grad.sum(0)
        return grad_x, None, grad_bias, grad_down, grad_up, None, None

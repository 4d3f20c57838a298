"""The entry point of core-plugin: parameters and function. Does not import torch."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from core_plugin_muon.coefficients import schedule
from core_plugin_muon.options import AdjustLR, Rule, WorkingDtype, check_option

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

Coefficients = Literal["keller_jordan", "polar_express", "you", "cans"]


@dataclass(frozen=True)
class Params:
    """Options of the optimizer named `muon`.

    The default learning rate goes with the default `adjust_lr_fn`, under which an update of Muon
    is as large as one of AdamW: 3e-3 suits small models (tens of millions of parameters and less)
    trained from scratch. Begin with the model's AdamW learning rate for large ones (3e-4 to 1e-3)
    and for fine-tuning (1e-5 to 1e-4). With `adjust_lr_fn: original`, start from `lr: 0.02` and
    give `adamw_lr` a value of its own, such as 1e-3.

    Attributes:
        lr: learning rate of the hidden matrices; each step changes a matrix by `lr` times its
            scaled orthogonal factor.
        weight_decay: decoupled decay of the hidden matrices; a step multiplies them by
            `1 - lr * weight_decay`, with `lr` unscaled.
        momentum: weight of the past in the moving average of gradients, in [0, 1).
        nesterov: orthogonalize the average looked ahead by the newest gradient.
        ns_coefficients: of the Newton-Schulz iterations: the name of a published set, one triple
            for all steps, or a list of one triple a step.
        ns_steps: Newton-Schulz iterations a step.
        adjust_lr_fn: factor on the orthogonal update of a matrix with r rows and c columns:
            `match_rms_adamw` 0.2 * sqrt(max(r, c)), so that one learning rate serves both halves;
            `original` sqrt(max(1, r / c)), Keller Jordan's; `spectral` sqrt(r / c); `none` 1.
        ns_dtype: number format of the Newton-Schulz iterations: `auto` is bfloat16 where the
            device computes in it, and float32 elsewhere.
        bucket_cap_mb: megabytes of matrices that a rank orthogonalizes between two exchanges.
        adamw_lr: learning rate of all other parameters; null for `lr`.
        adamw_betas: AdamW's weights of the past for the gradient and its square, in [0, 1).
        adamw_eps: AdamW's term in the denominator, in units of the gradient.
        adamw_weight_decay: decoupled decay of all other parameters; null for `weight_decay`.
        rules: what becomes of the parameters whose name a regular expression finds, in the place
            of the choice by type; the first that matches decides. Each has `match`; `to`, which
            is `muon`, `adamw`, or `skip` for not at all; and for Muon `split`, the rows of the
            blocks of a fused matrix, and `flatten`, to join all dimensions after the first.

    Raises:
        ValueError: values are out of range; names the fields and the values.
    """

    lr: float = 3e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: Coefficients | tuple[float, ...] | tuple[tuple[float, ...], ...] = (
        "keller_jordan"
    )
    ns_steps: int = 5
    adjust_lr_fn: AdjustLR = "match_rms_adamw"
    ns_dtype: WorkingDtype = "auto"
    bucket_cap_mb: float = 25
    adamw_lr: float | None = None
    adamw_betas: tuple[float, float] = (0.9, 0.95)
    adamw_eps: float = 1e-8
    adamw_weight_decay: float | None = None
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        if faults := list(self._faults()):
            raise ValueError("; ".join(faults))

    def _faults(self) -> Iterator[str]:
        for field, value in vars(self).items():
            try:
                if field == "ns_coefficients":
                    schedule(value, self.ns_steps)
                elif field != "rules":  # each has checked itself
                    check_option(field, value)
            except ValueError as error:
                yield str(error)


def muon(model: "nn.Module", params: Params) -> "Optimizer":
    """Muon for the hidden matrices of a model, AdamW for the rest of what it trains.

    Args:
        model: the model, bare, wrapped or sharded. Parameters that do not require gradients are
            left out.
        params: the options.

    Returns:
        One optimizer. Its groups carry the parameters' names.

    Raises:
        ValueError: the model trains no hidden matrix, hides a parameter from its own traversal,
            or a rule decides nothing in it.
    """
    from core_plugin_muon.optimizer import Muon
    from core_plugin_muon.report import format_report

    optimizer = Muon.for_model(
        model,
        params.rules,
        adamw_lr=params.adamw_lr,
        adamw_weight_decay=params.adamw_weight_decay,
        lr=params.lr,
        weight_decay=params.weight_decay,
        momentum=params.momentum,
        nesterov=params.nesterov,
        ns_coefficients=params.ns_coefficients,
        ns_steps=params.ns_steps,
        adjust_lr_fn=params.adjust_lr_fn,
        ns_dtype=params.ns_dtype,
        adamw_betas=params.adamw_betas,
        adamw_eps=params.adamw_eps,
        bucket_cap_mb=params.bucket_cap_mb,
    )
    logging.getLogger(__name__).info("parameters of muon:\n%s", format_report(optimizer))
    return optimizer

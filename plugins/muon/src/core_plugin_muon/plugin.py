"""The entry point of core-plugin: parameters and function. Does not import torch."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core_plugin_muon.options import Scale, WorkingDtype, check_option

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True)
class Params:
    """Options of the optimizer named `muon`.

    The default learning rate goes with the default `scale`, under which an update of Muon is as
    large as one of AdamW: 3e-3 suits small models (tens of millions of parameters and less)
    trained from scratch. Begin with the model's AdamW learning rate for large ones (3e-4 to 1e-3)
    and for fine-tuning (1e-5 to 1e-4). With `scale: original`, start from `lr: 0.02` and give
    `adamw_lr` a value of its own, such as 1e-3.

    Attributes:
        lr: learning rate of the hidden matrices; each step changes a matrix by `lr` times its
            scaled orthogonal factor.
        weight_decay: decoupled decay of the hidden matrices; a step multiplies them by
            `1 - lr * weight_decay`, with `lr` unscaled.
        momentum: weight of the past in the moving average of gradients, in [0, 1).
        nesterov: orthogonalize the average looked ahead by the newest gradient.
        ns_steps: Newton-Schulz iterations a step.
        scale: factor on the orthogonal update of a matrix with r rows and c columns:
            `match_rms_adamw` 0.2 * sqrt(max(r, c)), so that one learning rate serves both halves;
            `original` sqrt(max(1, r / c)), Keller Jordan's; `none` 1.
        adamw_lr: learning rate of all other parameters; null for `lr`.
        adamw_betas: AdamW's weights of the past for the gradient and its square, in [0, 1).
        adamw_eps: AdamW's term in the denominator, in units of the gradient.
        adamw_weight_decay: decoupled decay of all other parameters; null for `weight_decay`.
        dtype: number format of the Newton-Schulz iterations: `auto` is bfloat16 on CUDA devices
            and float32 elsewhere.

    Raises:
        ValueError: a value is out of range; names the field and the value.
    """

    lr: float = 3e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    scale: Scale = "match_rms_adamw"
    adamw_lr: float | None = None
    adamw_betas: tuple[float, float] = (0.9, 0.95)
    adamw_eps: float = 1e-8
    adamw_weight_decay: float | None = None
    dtype: WorkingDtype = "auto"

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if value is None and field in ("adamw_lr", "adamw_weight_decay"):
                continue
            check_option(field.removeprefix("adamw_"), value, label=field)


def muon(model: "nn.Module", params: Params) -> "Optimizer":
    """Muon for the hidden matrices of a model, AdamW for the rest of what it trains.

    Args:
        model: the model, bare, wrapped or sharded. Parameters that do not require gradients are
            left out.
        params: the options.

    Returns:
        One optimizer with a parameter group for each of the two algorithms (for one, if the other
        has no parameters). Its groups carry the parameters' names.

    Raises:
        ValueError: the model trains no hidden matrix, or hides a parameter from its own traversal.
    """
    from core_plugin_muon.optimizer import Muon
    from core_plugin_muon.routing import format_routes, route

    routes = route(model)
    logging.getLogger(__name__).info("parameters of muon and adamw:\n%s", format_routes(routes))
    options: dict[str, dict[str, object]] = {
        "muon": {
            "lr": params.lr,
            "weight_decay": params.weight_decay,
            "momentum": params.momentum,
            "nesterov": params.nesterov,
            "ns_steps": params.ns_steps,
            "scale": params.scale,
            "dtype": params.dtype,
        },
        "adamw": {
            "lr": params.lr if params.adamw_lr is None else params.adamw_lr,
            "weight_decay": (
                params.weight_decay
                if params.adamw_weight_decay is None
                else params.adamw_weight_decay
            ),
            "betas": params.adamw_betas,
            "eps": params.adamw_eps,
        },
    }
    members = {
        algorithm: [(row.name, row.parameter) for row in routes if row.algorithm == algorithm]
        for algorithm in options
    }
    return Muon(
        [
            {"params": members[algorithm], "algorithm": algorithm, **chosen}
            for algorithm, chosen in options.items()
            if members[algorithm]
        ]
    )

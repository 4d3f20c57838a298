"""Muon and AdamW in one optimizer, on plain and on sharded parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from core_plugin_muon.exchange import Shape, plan_exchange
from core_plugin_muon.groups import Group, check_matrices, complete_group, merge_saved
from core_plugin_muon.layout import (
    gather_whole,
    is_row_sharded,
    local_gradient,
    local_part,
    own_part,
)
from core_plugin_muon.newton_schulz import orthogonalize, update_scale, working_dtype
from core_plugin_muon.options import Scale, WorkingDtype, check_option

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim.optimizer import ParamsT, StateDict


class Muon(Optimizer):
    """Muon for hidden matrices and AdamW for the rest, each in parameter groups of its own.

    A group says which with its key `algorithm`, "muon" (the default) or "adamw", and may set the
    options of that algorithm; what it leaves out has the value given to the constructor. A step
    of Muon moves the average `m` of the gradient `g` and changes the matrix `p` of r x c:

        m += (1 - momentum) * (g - m)
        u  = g + momentum * (m - g) if nesterov else m
        p  = p * (1 - lr * weight_decay) - lr * scale(r, c) * orthogonalize(u)

    Gradients are read, never written. State has the keys and meanings of `torch.optim.Muon`
    (`momentum_buffer`) and `torch.optim.AdamW` (`step`, `exp_avg`, `exp_avg_sq`), each tensor
    laid out as its parameter; the first step creates it for every parameter that requires
    gradients, with or without one at hand. Checkpoints thus move between these optimizers and
    between numbers of ranks.

    Parameters that FSDP2 shards by rows are brought together, one rank for each matrix,
    orthogonalized there once, and sent back: two all-to-alls a step, whichever gradients exist.
    All ranks must call `step` together then. A part without a gradient counts as zeros and is
    left as it was. The result is bitwise that of one process with the same gradients. Plain
    parameters, those of DDP among them, are computed on each rank; other DTensor layouts too,
    with a warning, since that is slow.

    Sources: Keller Jordan, Muon (https://kellerjordan.github.io/posts/muon); for the scale
    `match_rms_adamw`, Liu et al., Muon is Scalable for LLM Training (arXiv 2502.16982).

    Args:
        params: parameters, named parameters, or groups of either. Those of Muon are matrices.
        lr: learning rate. 3e-3 suits small models with the scale `match_rms_adamw`, 0.02 those
            with `original`.
        weight_decay: decoupled decay; a step multiplies by `1 - lr * weight_decay`.
        momentum: weight of the past in Muon's average of gradients, in [0, 1).
        nesterov: look the average ahead by the newest gradient.
        ns_steps: Newton-Schulz iterations a step.
        scale: `match_rms_adamw`, `original` or `none`; see `update_scale`.
        dtype: number format of the iterations, `float32`, `bfloat16`, or `auto`: bfloat16 on
            CUDA devices, float32 elsewhere.
        betas: AdamW's weights of the past for the gradient and for its square, in [0, 1).
        eps: AdamW's term in the denominator, in units of the gradient.

    Raises:
        ValueError: an option is unknown or out of range, or a parameter of a Muon group is no
            real floating-point matrix; also when a group is added later.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        scale: Scale = "match_rms_adamw",
        dtype: WorkingDtype = "auto",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        self._options: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "scale": scale,
            "dtype": dtype,
            "betas": betas,
            "eps": eps,
        }
        for option, value in self._options.items():
            check_option(option, value)
        # Options that only one algorithm has must not become defaults of every group.
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:  # of copies and pickles
        return {**super().__getstate__(), "_options": self._options}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Args:
            param_group: `params`, `algorithm` and any of that algorithm's options.

        Raises:
            ValueError: as for the constructor; the optimizer is then as it was.
        """
        where = f"parameter group {len(self.param_groups)}"
        complete_group(param_group, self._options, where)
        super().add_param_group(param_group)
        if param_group["algorithm"] == "muon":
            try:
                check_matrices(param_group, where)
            except ValueError:
                self.param_groups.pop()
                raise

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state of this optimizer, of `torch.optim.Muon` or of `torch.optim.AdamW`.

        Options that the state's groups lack keep their present values.

        Args:
            state_dict: what `state_dict()` returned.

        Raises:
            ValueError: the groups differ in number, size or algorithm, or hold an option out of
                range.
        """
        saved = state_dict["param_groups"]
        merged = [
            merge_saved(group, other, f"parameter group {index}")
            for index, (group, other) in enumerate(zip(self.param_groups, saved, strict=False))
        ]
        # What is left over makes torch report that the numbers of groups differ.
        super().load_state_dict({**state_dict, "param_groups": [*merged, *saved[len(merged) :]]})

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch overloads on whether there is a closure
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: computes gradients anew and returns the loss.

        Returns:
            The closure's loss, or None without a closure.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        row_sharded: dict[tuple[DeviceMesh, torch.dtype], list[tuple[Tensor, Group]]] = {}
        for group in self.param_groups:
            self._create_state(group)
            if group["algorithm"] == "adamw":
                self._step_adamw(group)
                continue
            for parameter in group["params"]:
                if is_row_sharded(parameter):
                    bucket = parameter.device_mesh, working_dtype(group["dtype"], parameter.device)
                    row_sharded.setdefault(bucket, []).append((parameter, group))
                else:
                    self._step_matrix(parameter, group)
        for (mesh, dtype), members in row_sharded.items():
            self._step_row_sharded(members, mesh, dtype)
        return loss

    def _create_state(self, group: Group) -> None:
        # Not in the constructor: torch's distributed checkpoint takes an optimizer with any state
        # for one that has all of it, and would then restore nothing. And not by who has a
        # gradient: all ranks must save the same keys.
        for parameter in group["params"]:
            trained = parameter.requires_grad or parameter.grad is not None
            if not trained or self.state.get(parameter):
                continue
            if group["algorithm"] == "muon":
                self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
            else:
                self.state[parameter] = {
                    "step": torch.tensor(0.0, dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    def _step_adamw(self, group: Group) -> None:
        with_gradient = [
            (parameter, gradient)
            for parameter in group["params"]
            if (gradient := local_gradient(parameter)) is not None
        ]
        states = [self.state[parameter] for parameter, _ in with_gradient]
        # Elementwise, so that each rank can do its own part without talking.
        adamw(
            [local_part(parameter) for parameter, _ in with_gradient],
            [gradient for _, gradient in with_gradient],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            has_complex=any(gradient.is_complex() for _, gradient in with_gradient),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _step_matrix(self, parameter: Tensor, group: Group) -> None:
        """Step a plain matrix, or one whose layout has every rank compute it whole."""
        direction = self._advance(parameter, group)
        dtype = working_dtype(group["dtype"], parameter.device)
        steps = group["ns_steps"]
        if isinstance(parameter, DTensor):
            whole = gather_whole(_or_zeros(direction, parameter).to(dtype), parameter)
            update = own_part(orthogonalize(whole, steps=steps, dtype=dtype), parameter)
        elif direction is not None:
            update = orthogonalize(direction, steps=steps, dtype=dtype)
        if direction is not None:
            _apply(update, parameter, group)

    def _step_row_sharded(
        self, members: list[tuple[Tensor, Group]], mesh: DeviceMesh, dtype: torch.dtype
    ) -> None:
        """Step matrices that a mesh shards by rows, each orthogonalized by one rank."""
        directions = [self._advance(parameter, group) for parameter, group in members]
        blocks = [
            _or_zeros(direction, parameter).to(dtype)
            for direction, (parameter, _) in zip(directions, members, strict=True)
        ]
        shapes = tuple(cast("Shape", tuple(parameter.shape)) for parameter, _ in members)
        exchange = plan_exchange(shapes, mesh.size(), mesh.get_local_rank())
        matrices = exchange.gather(blocks, mesh.get_group())
        results = [
            orthogonalize(matrix, steps=members[index][1]["ns_steps"], dtype=dtype)
            for index, matrix in zip(exchange.owned, matrices, strict=True)
        ]
        updates = exchange.scatter(results, mesh.get_group(), like=blocks[0])
        for direction, update, (parameter, group) in zip(directions, updates, members, strict=True):
            if direction is not None:
                _apply(update, parameter, group)

    def _advance(self, parameter: Tensor, group: Group) -> Tensor | None:
        """Move the momentum; return this rank's part of what to orthogonalize, not to be written.

        Without a gradient the momentum stays, and the return is None.
        """
        gradient = local_gradient(parameter)
        if gradient is None:
            return None
        momentum = group["momentum"]
        buffer = local_part(self.state[parameter]["momentum_buffer"])
        gradient = gradient.to(buffer.dtype)
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum) if group["nesterov"] else buffer


def _or_zeros(direction: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(local_part(parameter)) if direction is None else direction


def _apply(update: Tensor, parameter: Tensor, group: Group) -> None:
    """Decay this rank's part of a matrix and add its part of the orthogonal update."""
    lr = float(group["lr"])
    rows, columns = parameter.shape
    part = local_part(parameter)
    part.mul_(1 - lr * group["weight_decay"])
    part.add_(update, alpha=-lr * update_scale(group["scale"], rows, columns))

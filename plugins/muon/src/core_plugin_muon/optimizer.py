"""Muon and AdamW in one optimizer, on plain and on sharded parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from core_plugin_muon.adamw import step_adamw
from core_plugin_muon.groups import (
    Group,
    check_matrices,
    complete_group,
    groups_of,
    merge_saved,
    resolve_coefficients,
)
from core_plugin_muon.layout import (
    check_dense,
    gather_whole,
    local_gradient,
    local_part,
    own_part,
    process_group_of,
)
from core_plugin_muon.matrices import matrices_of, rows_of
from core_plugin_muon.newton_schulz import orthogonalize, update_scale, working_dtype
from core_plugin_muon.options import AdjustLR, WorkingDtype, check_option
from core_plugin_muon.teams import Member, Team, agree_on, coefficients_of, make_teams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn
    from torch.optim.optimizer import ParamsT, StateDict

    from core_plugin_muon.coefficients import Triple
    from core_plugin_muon.options import Rule


class Muon(Optimizer):
    """Muon for hidden matrices and AdamW for the rest, each in parameter groups of its own.

    A group says which with its key `algorithm`, "muon" (the default) or "adamw", and may set the
    options of that algorithm; what it leaves out has the value given to the constructor. A step
    of Muon moves the average `m` of the gradient `g` and changes the matrix `p` of r x c:

        m += (1 - momentum) * (g - m)
        u  = g + momentum * (m - g) if nesterov else m
        p  = p * (1 - lr * weight_decay) - lr * scale(r, c) * orthogonalize(u)

    Of a parameter with more than two dimensions the group says whether it is one matrix
    (`flatten=True`, a convolution) or a stack of them (`flatten=False`, experts); `split`, the
    rows of blocks, makes several matrices of a fused one. Each matrix is orthogonalized and
    scaled by itself. A group of the algorithm "skip" is held and left as it is.

    Gradients are read, never written. State has the keys and meanings of `torch.optim.Muon`
    (`momentum_buffer`) and `torch.optim.AdamW` (`step`, `exp_avg`, `exp_avg_sq`), each tensor
    laid out as its parameter; the first step creates it for every parameter that requires
    gradients, with or without one at hand. Checkpoints thus move between numbers of ranks, and
    between these optimizers, as far as the other has the options: `torch.optim.Muon` has neither
    `spectral` nor `none` nor more than one triple, and works in bfloat16.

    On several ranks each matrix is orthogonalized by one of them. Parameters that FSDP2 shards by
    rows travel to their owner and back in two all-to-alls a bucket, under hybrid sharding within
    each group of shards; plain ones, which `process_group` holds in common, are computed in
    shares and gathered, in one all-gather a bucket. All ranks must call `step` together,
    whichever gradients exist, if those are laid out as their parameters: a part without one counts
    as zeros and is left as it was. The result is bitwise that of one process with the same
    gradients. Other DTensor layouts are computed whole on each rank, with a warning, since that is
    slow.

    Sources: Keller Jordan, Muon (https://kellerjordan.github.io/posts/muon); for the scale
    `match_rms_adamw`, Liu et al., Muon is Scalable for LLM Training (arXiv 2502.16982).

    Args:
        params: parameters, named parameters, or groups of either.
        lr: learning rate. 3e-3 suits small models with `match_rms_adamw`, 0.02 those with
            `original`.
        weight_decay: decoupled decay; a step multiplies by `1 - lr * weight_decay`.
        momentum: weight of the past in Muon's average of gradients, in [0, 1).
        nesterov: look the average ahead by the newest gradient.
        ns_coefficients: of the Newton-Schulz iteration: the name of a set (see `coefficients`),
            one triple, or one triple a step.
        ns_steps: Newton-Schulz iterations a step.
        adjust_lr_fn: factor on the orthogonal update: `match_rms_adamw`, `original`, `spectral`
            or `none`; see `update_scale`. None is `original`, as in `torch.optim.Muon`.
        ns_dtype: number format of the iterations, `float32`, `bfloat16`, or `auto`: bfloat16
            where the hardware computes in it, float32 elsewhere.
        adamw_betas: AdamW's weights of the past for the gradient and for its square, in [0, 1);
            `betas` in its groups.
        adamw_eps: AdamW's term in the denominator, in units of the gradient; `eps` in its groups.
        process_group: the ranks that hold the same plain parameters and gradients, as those of
            `DistributedDataParallel`; None if there is none, or to compute everything on each. A
            copy or pickle of the optimizer has None.
        bucket_cap_mb: size of what a rank owns of a bucket, in MiB, about.

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
        ns_coefficients: str | Triple | Sequence[Triple] = "keller_jordan",
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLR | None = "match_rms_adamw",
        ns_dtype: WorkingDtype = "auto",
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
    ) -> None:
        check_option("bucket_cap_mb", bucket_cap_mb)
        self._options: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "adjust_lr_fn": "original" if adjust_lr_fn is None else adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
        }
        for option, value in self._options.items():
            if option != "ns_coefficients":
                check_option(option, value)
        self._options["ns_coefficients"] = resolve_coefficients(self._options)
        self._options |= {"eps": 1e-7, "flatten": None, "split": ()}  # torch.optim.Muon's eps
        self._bucket_cap_mb = bucket_cap_mb
        self._process_group = process_group
        self._teams: list[Team] = []
        self._others: list[Member] = []
        self._teamed: object = None
        self._agreed: object = None
        # Not the routes: their parameters would live on when a model is sharded after this.
        self.reasons: dict[str, str] = {}
        """Why each parameter is in its group, by name, if `for_model` made the groups."""
        # Options that only one algorithm has must not become defaults of every group.
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        rules: Iterable[Rule | Mapping[str, Any]] = (),
        *,
        adamw_lr: float | None = None,
        adamw_weight_decay: float | None = None,
        **options: Any,
    ) -> Muon:
        """An optimizer of all parameters that a model trains, routed by `route`.

        Args:
            model: the model, bare, wrapped or sharded. Under `DistributedDataParallel` the ranks
                share the work.
            rules: see `route`.
            adamw_lr: learning rate of AdamW's parameters; None for `lr`.
            adamw_weight_decay: decay of AdamW's parameters; None for `weight_decay`.
            options: of the constructor.

        Raises:
            ValueError: as for `route` and the constructor; or ranks would share the work on what
                `DistributedDataParallel` was told to ignore.
        """
        from core_plugin_muon.routing import route

        routes = route(model, rules)
        if "process_group" not in options:
            shared = {row.name: row.parameter for row in routes if row.algorithm == "muon"}
            options["process_group"] = process_group_of(model, shared)
        apart = {"lr": adamw_lr, "weight_decay": adamw_weight_decay}
        of_adamw = {option: value for option, value in apart.items() if value is not None}
        optimizer = cls(groups_of(routes, **of_adamw), **options)
        optimizer.reasons = {row.name: row.reason for row in routes}
        return optimizer

    def __getstate__(self) -> dict[str, Any]:  # of copies and pickles
        apart = {
            "_options": self._options,
            "_bucket_cap_mb": self._bucket_cap_mb,
            "_process_group": None,  # it can be in neither; the copy computes everything
            "_teams": [],
            "_others": [],
            "_teamed": None,
            "_agreed": None,
            "reasons": self.reasons,
        }
        return {**super().__getstate__(), **apart}

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

        Options that the state's groups lack keep their present values, and so do `flatten` and
        `split`.

        Args:
            state_dict: what `state_dict()` returned.

        Raises:
            ValueError: the groups differ in number, size, algorithm or the order of names, hold
                an option out of range, or a state of another shape or that another optimizer
                wrote; nothing was changed then.
        """
        merged = merge_saved(self.param_groups, state_dict)
        # What is left over makes torch report that the numbers of groups differ.
        left_over = state_dict["param_groups"][len(merged) :]
        super().load_state_dict({**state_dict, "param_groups": [*merged, *left_over]})

    def describe_parameters(self, world_size: int | None = None) -> list[dict[str, object]]:
        """A row for each parameter, for a table: where it goes, why, and who computes it.

        Works on `meta` and without a process group.

        Args:
            world_size: number of ranks to plan for, as if they sharded by rows; None for those
                there are.
        """
        from core_plugin_muon.report import describe

        return describe(self, world_size)

    @torch.no_grad()
    @torch._disable_dynamo  # loaded when it is called, unlike torch.compiler.disable
    def step(  # type: ignore[override]  # torch overloads on whether there is a closure
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: computes gradients anew and returns the loss.

        Returns:
            The closure's loss, or None without a closure.

        Raises:
            RuntimeError: a gradient is sparse; or ranks that share out Muon's parameters have other
                ones, in another order or with other options. That is compared in the first step,
                and when what they share out has changed.
            ValueError: an `adjust_lr_fn` was changed to one that there is not.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["algorithm"] != "skip":
                check_dense(group["params"])
            if group["algorithm"] == "muon":
                check_option("adjust_lr_fn", group["adjust_lr_fn"])
        teams, others = self.teams()
        self._agree(teams)
        for group in self.param_groups:
            self._create_state(group)
            if group["algorithm"] == "adamw":
                self._step_adamw(group)
        # Once a group: of a tensor on a device it waits for that device.
        rates = {id(group): float(group["lr"]) for group in self.param_groups}
        for team in teams:
            self._step_team(team, rates)
        for parameter, group in others:
            self._step_on_every_rank(cast("DTensor", parameter), group, rates[id(group)])
        return loss

    def teams(self) -> tuple[list[Team], list[Member]]:
        """Muon's parameters by the ranks that share them out, and those that no ranks share.

        Made anew when a group or a parameter was exchanged for another; no rank talks for it.
        """
        members = [
            (parameter, group)
            for group in self.param_groups
            if group["algorithm"] == "muon"
            for parameter in group["params"]
        ]
        plan_options = ("ns_dtype", "ns_steps", "ns_coefficients", "flatten", "split")
        teamed = [
            (id(parameter), parameter.device, id(group), *map(group.get, plan_options))
            for parameter, group in members
        ]
        if teamed != self._teamed:
            self._teams, self._others = make_teams(
                members, self._process_group, self._bucket_cap_mb
            )
            self._teamed = teamed
        return self._teams, self._others

    def _agree(self, teams: list[Team]) -> None:
        # By what the plans are, not by when they were made: one rank alone may load a state.
        plans = [(team.exchange.group, team.dtype, team.exchange.plan) for team in teams]
        if plans != self._agreed:
            agree_on(teams)
            self._agreed = plans

    def _create_state(self, group: Group) -> None:
        # Not in the constructor: torch's distributed checkpoint takes an optimizer with any state
        # for one that has all of it, and would then restore nothing. And not by who has a
        # gradient: all ranks must save the same keys.
        for parameter in group["params"]:
            trained = parameter.requires_grad or parameter.grad is not None
            if not trained or self.state.get(parameter):
                continue
            if group["algorithm"] == "skip":  # torch's distributed checkpoint looks for an entry
                self.state[parameter] = {}
            elif group["algorithm"] == "muon":
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
        # Elementwise, so that each rank can do its own part without talking.
        step_adamw(
            [local_part(parameter) for parameter, _ in with_gradient],
            [gradient for _, gradient in with_gradient],
            [
                {key: local_part(value) for key, value in self.state[parameter].items()}
                for parameter, _ in with_gradient
            ],
            group,
        )

    def _step_team(self, team: Team, rates: Mapping[int, float]) -> None:
        gradients = [self._advance(parameter, group) for parameter, group in team.members]

        def direction(member: int, rows: range) -> Tensor | None:
            parameter, group = team.members[member]
            where = rows.start, len(rows), group["flatten"]
            gradient = gradients[member]
            if gradient is None:
                return None
            average = rows_of(self._average(parameter), *where)
            part = _looked_ahead(rows_of(gradient, *where), average, group)
            return part.to(team.dtype).flatten(1)

        matrices = team.exchange.plan.matrices
        for number, start, update in team.updates(direction):
            matrix = matrices[number]
            parameter, group = team.members[matrix.parameter]
            if gradients[matrix.parameter] is not None:
                part = rows_of(local_part(parameter), start, len(update), group["flatten"])
                _apply(update, part, group, rates[id(group)], matrix.shape)

    def _step_on_every_rank(self, parameter: DTensor, group: Group, lr: float) -> None:
        """Step a parameter in a layout that ranks cannot share out: each computes it whole."""
        gradient = self._advance(parameter, group)
        dtype = working_dtype(group["ns_dtype"], parameter.device)
        if gradient is None:
            direction = torch.zeros_like(local_part(parameter))
        else:
            direction = _looked_ahead(gradient, self._average(parameter), group)
        directions = gather_whole(direction.to(dtype), parameter)
        whole = gather_whole(local_part(parameter), parameter)
        matrices = matrices_of(0, whole.shape, group["flatten"], group["split"])
        rows = [(matrix.start, matrix.rows, group["flatten"]) for matrix in matrices]
        updates = orthogonalize(
            [rows_of(directions, *where).flatten(1) for where in rows],
            coefficients_of(group),
            dtype,
            group["eps"],
        )
        for matrix, where, update in zip(matrices, rows, updates, strict=True):
            _apply(update, rows_of(whole, *where), group, lr, matrix.shape)
        if gradient is not None:
            local_part(parameter).copy_(own_part(whole, parameter))

    def _average(self, parameter: Tensor) -> Tensor:
        """This rank's part of a parameter's average of gradients."""
        return local_part(self.state[parameter]["momentum_buffer"])

    def _advance(self, parameter: Tensor, group: Group) -> Tensor | None:
        """Move the average; return this rank's part of the gradient, None without one."""
        gradient = local_gradient(parameter)
        if gradient is None:
            return None
        buffer = self._average(parameter)
        gradient = gradient.to(buffer.dtype)
        buffer.lerp_(gradient, 1 - group["momentum"])
        return gradient


def _looked_ahead(gradient: Tensor, average: Tensor, group: Group) -> Tensor:
    """What to orthogonalize, in the average's dtype; not to be written to."""
    return gradient.lerp(average, group["momentum"]) if group["nesterov"] else average


def _apply(update: Tensor, part: Tensor, group: Group, lr: float, shape: tuple[int, int]) -> None:
    """Decay rows of a parameter and add their part of the orthogonal update of a matrix."""
    part.mul_(1 - lr * group["weight_decay"])
    if update.dtype == part.dtype != torch.float32:
        # A CPU rounds a sum of two halves once or twice, by where in the memory an element is.
        update = update.float()
    part.add_(update.view(part.shape), alpha=-lr * update_scale(group["adjust_lr_fn"], *shape))

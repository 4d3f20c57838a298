"""Parameter groups: what they may hold, checked when they are added and when they are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from torch import Tensor

from core_plugin_muon.coefficients import schedule
from core_plugin_muon.matrices import matrices_of
from core_plugin_muon.options import OPTIONS, Algorithm, check_option

if TYPE_CHECKING:
    from core_plugin_muon.routing import Route

Group = dict[str, Any]

_OTHER_KEYS = (
    *("params", "param_names", "algorithm", "decoupled_weight_decay"),
    *("initial_lr", "max_momentum", "base_momentum"),
)
"""Keys that look like an option; the last are those that torch's schedules write."""
_NOT_DONE = ("amsgrad", "maximize")
"""Options of `torch.optim.AdamW` that change what a step does, and that there are none of here."""

_STATE_KEYS: dict[Algorithm, tuple[str, ...]] = {
    "muon": ("momentum_buffer",),
    "adamw": ("step", "exp_avg", "exp_avg_sq"),
    "skip": (),
}


def groups_of(routes: Iterable[Route], **of_adamw: object) -> list[Group]:
    """Parameter groups, Muon's first, of parameters that are stepped and seen alike.

    Args:
        routes: where each parameter goes.
        of_adamw: options of AdamW's group.
    """
    groups: dict[object, Group] = {}
    for row in routes:
        group: Group = {"params": [], "algorithm": row.algorithm}
        if row.algorithm == "muon":
            group |= {"flatten": row.flatten, "split": row.split}
        elif row.algorithm == "adamw":
            group |= of_adamw
        kind = row.algorithm, row.flatten, row.split
        groups.setdefault(kind, group)["params"].append((row.name, row.parameter))
    return sorted(groups.values(), key=lambda group: group["algorithm"] != "muon")


def complete_group(group: Group, defaults: dict[str, Any], where: str) -> None:
    """Give a new group the options of its algorithm that it does not set itself.

    Args:
        group: changed in place; of the algorithm "muon" if it does not say.
        defaults: a value for each option; those that begin with `adamw_` are AdamW's alone.
        where: how errors name the group.

    Raises:
        ValueError: a key is misspelt or an option of the other algorithm, asks for what is not
            done here, or a value is out of range.
    """
    algorithm = group.setdefault("algorithm", "muon")
    check_option("algorithm", algorithm, f"algorithm of {where}")
    options = OPTIONS[algorithm]
    for key in group:
        if key in (*options, *_OTHER_KEYS):
            continue
        near = get_close_matches(key, options, n=1)
        # torch lets any other key be, as a schedule or the user may keep things of theirs there.
        if near or any(key in of_one for of_one in OPTIONS.values()):
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"{where} ({algorithm}) has the unknown key {key!r}; {hint}"
                f"its options are {', '.join(options)}"
            )
    for option in options:
        group.setdefault(option, defaults.get(f"{algorithm}_{option}", defaults.get(option)))
    _name_torchs_scale(group)
    _check_done_here(group, where)
    _check_options(group, where)


def merge_saved(present: Sequence[Group], state_dict: Mapping[str, Any]) -> list[Group]:
    """Saved groups, with the present value of each option that they lack.

    How parameters are seen as matrices, `flatten` and `split`, stays as it is, too: that belongs
    to the model.

    Args:
        present: the optimizer's groups.
        state_dict: what an optimizer saved.

    Returns:
        As many groups as there are in both.

    Raises:
        ValueError: a saved group is of another algorithm or asks for what is not done here, a
            value is out of range, a parameter is in another place, or a state does not fit.
    """
    saved = state_dict["param_groups"]
    _check_names(present, saved)
    merged = []
    for index, (group, other) in enumerate(zip(present, saved, strict=False)):
        where = f"parameter group {index}"
        merged.append(_merge(group, other, where))
        _check_states(merged[-1], group["params"], state_dict["state"], where)
    return merged


def _merge(present: Group, saved: Group, where: str) -> Group:
    seen: Group = {key: present[key] for key in ("flatten", "split") if key in present}
    group = {**present, **saved, **seen}
    _name_torchs_scale(group)
    if group["algorithm"] != present["algorithm"]:
        raise ValueError(
            f"{where} is of {present['algorithm']}, but the loaded state has one of "
            f"{group['algorithm']} in its place"
        )
    _check_done_here(group, f"loaded {where}")
    _check_options(group, f"loaded {where}")
    return group


def _check_names(present: Sequence[Group], saved: Sequence[Group]) -> None:
    """Refuse names in other places; those that are not of here may be of a renamed model."""
    names, others = ([*_names(groups)] for groups in (present, saved))
    for name, other in zip(names, others, strict=False):
        if other != name and other is not None and other in names:
            raise ValueError(
                f"the loaded state has {other} in the place of {name}: its parameters are in "
                "another order; make the groups as they were when it was saved"
            )


def _names(groups: Sequence[Group]) -> Iterator[str | None]:
    for group in groups:
        yield from group.get("param_names") or [None] * len(group["params"])


def _check_states(
    group: Group,
    parameters: Iterable[Tensor],
    states: Mapping[Any, Mapping[str, Any]],
    where: str,
) -> None:
    """Check that saved states, if there are any, are of the group's algorithm and of its shapes."""
    algorithm: Algorithm = group["algorithm"]
    for key, parameter in zip(group["params"], parameters, strict=False):
        state = states.get(key) or {}
        missing = [name for name in _STATE_KEYS[algorithm] if state and name not in state]
        if missing:
            raise ValueError(
                f"the state loaded for parameter {key} of {where} has {', '.join(state)}, but "
                f"{algorithm} needs {', '.join(missing)}: another optimizer wrote it"
            )
        for name in _STATE_KEYS[algorithm]:
            if state and name != "step" and state[name].shape != parameter.shape:
                raise ValueError(
                    f"the {name} loaded for parameter {key} of {where} has shape "
                    f"{tuple(state[name].shape)}, but the parameter {tuple(parameter.shape)}: "
                    "the state is of another model, or its parameters are in another order"
                )


def check_matrices(group: Group, where: str) -> None:
    """Check that Muon can orthogonalize each parameter of a group.

    Raises:
        ValueError: a parameter is no real floating-point matrix, stack of such, or flattened to
            one, or cannot be split; names it, its shape and its dtype.
    """
    names = group.get("param_names") or [f"number {i}" for i in range(len(group["params"]))]
    for name, parameter in zip(names, group["params"], strict=True):
        try:
            matrices_of(0, parameter.shape, group["flatten"], group["split"])
            if not parameter.is_floating_point():
                raise ValueError("it is not of real floating-point numbers")
        except ValueError as error:
            raise ValueError(
                f"Muon cannot orthogonalize parameter {name} of {where}, which has shape "
                f"{tuple(parameter.shape)} and dtype {parameter.dtype}: {error}; a group with "
                "algorithm='adamw' takes any parameter, and Muon.for_model(model) makes the groups "
                "for a whole model"
            ) from None


def _name_torchs_scale(group: Group) -> None:
    """Where `torch.optim.Muon` says None, it means `original`."""
    if group["algorithm"] == "muon" and group["adjust_lr_fn"] is None:
        group["adjust_lr_fn"] = "original"


def _check_done_here(group: Group, where: str) -> None:
    for option in _NOT_DONE:
        if group.get(option):
            raise ValueError(
                f"{where} has {option}=True, which is not for Muon; use torch.optim.AdamW, or set "
                "it to False if that is what you want"
            )
    if group.get("decoupled_weight_decay") is False and group.get("weight_decay", 0) > 0:
        raise ValueError(
            f"{where} is of torch.optim.Adam, which adds weight_decay to the gradients, while "
            "AdamW decays the parameters; set its weight_decay to 0, or its "
            "decoupled_weight_decay to True if that is what you want"
        )


def _check_options(group: Group, where: str) -> None:
    for option in OPTIONS[group["algorithm"]]:
        if option != "ns_coefficients":
            rule = "adamw_eps" if (group["algorithm"], option) == ("adamw", "eps") else option
            check_option(rule, group[option], f"{option} of {where}")
    if group["algorithm"] == "muon":
        group["ns_coefficients"] = resolve_coefficients(group, where)


def resolve_coefficients(options: Group, where: str = "the options") -> Any:
    """The triple of all steps if they have one, as `torch.optim.Muon` keeps it; else one a step.

    Raises:
        ValueError: there is no such set, or not a triple for each step.
    """
    try:
        steps = schedule(options["ns_coefficients"], options["ns_steps"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return steps[0] if len(set(steps)) == 1 else steps

"""Parameter groups: what they may hold, checked when they are added and when they are loaded."""

from difflib import get_close_matches
from typing import Any

from core_plugin_muon.options import OPTIONS, check_option

Group = dict[str, Any]

_OTHER_KEYS = ("params", "param_names", "algorithm", "initial_lr")


def complete_group(group: Group, defaults: dict[str, Any], where: str) -> None:
    """Give a new group the options of its algorithm that it does not set itself.

    Args:
        group: changed in place; of the algorithm "muon" if it does not say.
        defaults: a value for each option.
        where: how errors name the group.

    Raises:
        ValueError: a key is unknown to the algorithm, or a value is out of range.
    """
    algorithm = group.setdefault("algorithm", "muon")
    check_option("algorithm", algorithm, f"algorithm of {where}")
    options = OPTIONS[algorithm]
    for key in group:
        if key not in (*options, *_OTHER_KEYS):
            near = get_close_matches(key, options, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"{where} ({algorithm}) has the unknown key {key!r}; {hint}"
                f"its options are {', '.join(options)}"
            )
    for option in options:
        group.setdefault(option, defaults[option])
    _check_options(group, where)


def merge_saved(present: Group, saved: Group, where: str) -> Group:
    """A saved group, with the present value of each option that it lacks.

    Raises:
        ValueError: the saved group is of another algorithm, or a value is out of range.
    """
    group = {**present, **saved}
    if group["algorithm"] != present["algorithm"]:
        raise ValueError(
            f"{where} is of {present['algorithm']}, but the loaded state has one of "
            f"{group['algorithm']} in its place"
        )
    _check_options(group, f"loaded {where}")
    return group


def check_matrices(group: Group, where: str) -> None:
    """Check that Muon can orthogonalize each parameter of a group.

    Raises:
        ValueError: a parameter is no real floating-point matrix; names it and its shape.
    """
    names = group.get("param_names") or [f"number {i}" for i in range(len(group["params"]))]
    for name, parameter in zip(names, group["params"], strict=True):
        if parameter.ndim != 2 or parameter.numel() == 0 or not parameter.is_floating_point():
            raise ValueError(
                f"Muon takes floating-point matrices, but parameter {name} of {where} has shape "
                f"{tuple(parameter.shape)} and dtype {parameter.dtype}; put it in a group with "
                "algorithm='adamw'"
            )


def _check_options(group: Group, where: str) -> None:
    for option in OPTIONS[group["algorithm"]]:
        check_option(option, group[option], f"{option} of {where}")

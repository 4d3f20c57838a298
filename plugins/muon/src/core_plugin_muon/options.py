"""The options of a parameter group and the values each may take. Does not import torch."""

from collections.abc import Callable
from math import inf
from typing import Any, Literal, get_args

Algorithm = Literal["muon", "adamw"]
Scale = Literal["match_rms_adamw", "original", "none"]
WorkingDtype = Literal["auto", "float32", "bfloat16"]

OPTIONS: dict[Algorithm, tuple[str, ...]] = {
    "muon": ("lr", "weight_decay", "momentum", "nesterov", "ns_steps", "scale", "dtype"),
    "adamw": ("lr", "weight_decay", "betas", "eps"),
}
"""What a parameter group of each algorithm holds."""


def _one_of(literal: object) -> tuple[Callable[[Any], bool], str]:
    choices = get_args(literal)
    return lambda value: value in choices, f"one of {', '.join(map(repr, choices))}"


def _betas(value: Any) -> bool:
    first, second = value
    return bool(0 <= first < 1 and 0 <= second < 1)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "algorithm": _one_of(Algorithm),
    "lr": (lambda value: 0 <= value < inf, "a finite number >= 0"),
    "weight_decay": (lambda value: 0 <= value < inf, "a finite number >= 0"),
    "momentum": (lambda value: 0 <= value < 1, "a number in [0, 1)"),
    "nesterov": (lambda value: isinstance(value, bool), "true or false"),
    "ns_steps": (lambda value: type(value) is int and 1 <= value < 100, "an integer in [1, 100)"),
    "scale": _one_of(Scale),
    "dtype": _one_of(WorkingDtype),
    "betas": (_betas, "two numbers in [0, 1)"),
    "eps": (lambda value: 0 < value < inf, "a finite number > 0"),
}


def check_option(option: str, value: object, label: str | None = None) -> None:
    """Check one option's value.

    Args:
        option: a name in `OPTIONS`, or "algorithm".
        value: what it is to be set to.
        label: how the error names the option; its own name if not given.

    Raises:
        ValueError: the value is of the wrong kind or out of range; names the option and the value.
    """
    accepts, expected = _RULES[option]
    try:
        accepted = bool(accepts(value))
    except (TypeError, ValueError, RuntimeError):  # not comparable, not a pair, many-element tensor
        accepted = False
    if not accepted:
        raise ValueError(f"{label or option} must be {expected}, but is {value!r}")

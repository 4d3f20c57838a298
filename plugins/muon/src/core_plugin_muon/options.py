"""The options of a parameter group and the values each may take. Does not import torch."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any, Literal, get_args

Algorithm = Literal["muon", "adamw", "skip"]
AdjustLR = Literal["match_rms_adamw", "original", "spectral", "none"]
WorkingDtype = Literal["auto", "float32", "bfloat16"]

OPTIONS: dict[Algorithm, tuple[str, ...]] = {
    "muon": (
        "lr",
        "weight_decay",
        "momentum",
        "nesterov",
        "ns_coefficients",
        "eps",
        "ns_steps",
        "adjust_lr_fn",
        "ns_dtype",
        "flatten",
        "split",
    ),
    "adamw": ("lr", "weight_decay", "betas", "eps"),
    "skip": ("lr", "weight_decay"),
}
"""What a parameter group of each algorithm holds; schedulers want a learning rate in all."""


@dataclass(frozen=True)
class Rule:
    """What is to become of the parameters that a regular expression finds.

    Attributes:
        match: regular expression, searched for in a parameter's name.
        to: `muon`, `adamw`, or `skip` to leave the parameters as they are.
        split: rows of the blocks of a fused matrix, such as those of query, key and value; each
            block is orthogonalized by itself. Empty for one block.
        flatten: of a parameter with more than two dimensions, join all after the first to one
            matrix, as of a convolution; otherwise it is a stack of matrices.

    Raises:
        ValueError: a value cannot be; names the field.
    """

    match: str
    to: Algorithm
    split: tuple[int, ...] = ()
    flatten: bool = False

    def __post_init__(self) -> None:
        try:
            re.compile(self.match)
        except (re.error, TypeError) as error:
            raise ValueError(f"match: {self.match!r} is no regular expression: {error}") from None
        check_option("algorithm", self.to, "to")
        check_option("split", self.split)
        object.__setattr__(self, "split", tuple(self.split))  # a list could not be told apart
        check_option("flatten", self.flatten)
        if self.to != "muon" and (self.split or self.flatten):
            raise ValueError(f"split and flatten are for to: muon, not for to: {self.to}")


def as_rules(rules: Iterable[Rule | Mapping[str, Any]]) -> tuple[Rule, ...]:
    """Rules, some of which may be mappings of a rule's fields, as of a YAML file.

    Raises:
        ValueError: it is no list of rules, or one of them cannot be; names it by its number.
    """
    if isinstance(rules, Rule | Mapping | str) or not isinstance(rules, Iterable):
        raise ValueError(f"rules must be a list of rules, but is {rules!r}")
    return tuple(_as_rule(rule, f"rules[{number}]") for number, rule in enumerate(rules))


def _as_rule(rule: object, where: str) -> Rule:
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, Mapping):
        raise ValueError(f"{where} must be a Rule or a mapping of its fields, but is {rule!r}")
    known = [field.name for field in fields(Rule)]
    wrong = [f"does not know {key!r}" for key in rule if key not in known]
    wrong += [f"lacks {key!r}" for key in ("match", "to") if key not in rule]
    if wrong:
        raise ValueError(f"{where} {', '.join(wrong)}; its fields are {', '.join(known)}")
    try:
        return Rule(**rule)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _one_of(literal: object) -> tuple[Callable[[Any], bool], str]:
    choices = get_args(literal)
    return lambda value: value in choices, f"one of {', '.join(map(repr, choices))}"


def _betas(value: Any) -> bool:
    first, second = value
    return bool(0 <= first < 1 and 0 <= second < 1)


def _optional(value: Any) -> bool:
    return value is None or bool(0 <= value < inf)


def _sizes(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(type(n) is int and n > 0 for n in value)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "algorithm": _one_of(Algorithm),
    "lr": (lambda value: 0 <= value < inf, "a finite number >= 0"),
    "weight_decay": (lambda value: 0 <= value < inf, "a finite number >= 0"),
    "momentum": (lambda value: 0 <= value < 1, "a number in [0, 1)"),
    "nesterov": (lambda value: isinstance(value, bool), "true or false"),
    "ns_steps": (lambda value: type(value) is int and 1 <= value < 100, "an integer in [1, 100)"),
    "adjust_lr_fn": _one_of(AdjustLR),
    "ns_dtype": _one_of(WorkingDtype),
    "betas": (_betas, "two numbers in [0, 1)"),
    "eps": (lambda value: 0 < value < inf, "a finite number > 0"),
    "adamw_lr": (_optional, "a finite number >= 0, or null"),
    "adamw_weight_decay": (_optional, "a finite number >= 0, or null"),
    "adamw_betas": (_betas, "two numbers in [0, 1)"),
    "adamw_eps": (lambda value: 0 <= value < inf, "a finite number >= 0"),
    "flatten": (lambda value: value is None or isinstance(value, bool), "true or false"),
    "split": (_sizes, "row counts, each an integer > 0"),
    "bucket_cap_mb": (lambda value: 0 < value < inf, "a finite number > 0"),
}


def check_option(option: str, value: object, label: str | None = None) -> None:
    """Check one option's value.

    Args:
        option: a name in `OPTIONS` but `ns_coefficients`, "algorithm", "bucket_cap_mb", or the name
            of AdamW's option with `adamw_` before it.
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

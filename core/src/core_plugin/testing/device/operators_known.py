"""Operators that cannot be the same on a device and on the CPU, or need not be, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownDifference:
    """A difference that is not the device's fault.

    One that is not ``always`` there may be missing without being reported.
    """

    reason: str
    always: bool = True


_INDICES = KnownDifference("torch wants the indices on the CPU, and the comparison moves them")

KNOWN: dict[str, dict[tuple[str, str], KnownDifference]] = {
    "2.13": {
        ("tensor_split", "forward"): _INDICES,
        ("tensor_split", "backward"): _INDICES,
    },
}
"""By torch's minor version, and then by operator and kind ("forward" or "backward")."""

_MEMORY = "its result is memory as it was found"
_OVERFLOW = "the conversion of a number that the integer type does not have is undefined"
_SHIFT = "a shift by more than the width of the type, or by less than 0, is undefined"

UNDETERMINED = {
    "bitwise_left_shift": _SHIFT,
    "bitwise_right_shift": _SHIFT,
    "byte": _OVERFLOW,
    "char": _OVERFLOW,
    "empty": _MEMORY,
    "empty_like": _MEMORY,
    "empty_permuted": _MEMORY,
    "empty_strided": _MEMORY,
    "int": _OVERFLOW,
    "long": _OVERFLOW,
    "new_empty": _MEMORY,
    "new_empty_strided": _MEMORY,
    "short": _OVERFLOW,
    "unique": "with sorted=False the order is undefined",
}
"""The operators whose results torch does not determine; they are left out."""

NEEDS = {
    "linalg.lstsq": "float64",
    "linalg.lstsq.grad_oriented": "float64",
    "linalg.pinv": "float64",
    "linalg.pinv.hermitian": "float64",
    "linalg.pinv.singular": "float64",
}
"""Capabilities that are used inside one of torch's own kernels (``linalg_pinv.atol_rtol_tensor``),
where the comparison does not see it. All else that an operator uses is seen when it runs."""

"""Coefficients of the Newton-Schulz iteration. Does not import torch.

A triple a, b, c is the polynomial `a x + b x^3 + c x^5` that one step applies to the singular
values. The sets:

keller_jordan: Keller Jordan, Muon (https://kellerjordan.github.io/posts/muon); every step alike.
polar_express: Amsel et al., The Polar Express (arXiv 2505.16932), algorithm 1, with its safety
    factor of 1.01 on all triples but the last.
you: @YouJiacheng, in modded-nanogpt (https://leloykun.github.io/ponder/muon-opt-coeffs).
cans: Grishina et al., Chebyshev-type polynomials (arXiv 2506.10935), to four digits as in NVIDIA's
    Emerging-Optimizers, with a safety factor of 1.02. As published they send singular values just
    above 1, which rounding makes of a matrix of rank one, to infinity.

A safety factor f makes a polynomial that of `x / f`.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Any

Triple = tuple[float, float, float]
Spec = str | Sequence[float] | Sequence[Sequence[float]]
"""The name of a set, one triple for all steps, or a triple for each step."""


def _with_safety_factor(factor: float, *triples: Triple) -> tuple[Triple, ...]:
    return tuple((a / factor, b / factor**3, c / factor**5) for a, b, c in triples)


_POLAR_EXPRESS = _with_safety_factor(
    1.01,
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)

SETS: dict[str, tuple[Triple, ...]] = {
    "keller_jordan": ((3.4445, -4.7750, 2.0315),),
    "polar_express": (*_POLAR_EXPRESS, (1.875, -1.25, 0.375)),
    "you": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "cans": _with_safety_factor(
        1.02,
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
}
"""The triples of each named set, in the order of the steps."""


def schedule(spec: Spec, steps: int) -> tuple[Triple, ...]:
    """The triple of each step.

    Args:
        spec: the name of a set, which is cut to `steps` or repeats its last triple; one triple,
            for all steps; or a triple for each step.
        steps: number of steps.

    Raises:
        ValueError: the name is unknown, a triple is not three finite numbers, or there is not one
            for each step.
    """
    if isinstance(spec, str):
        return _repeat_last(_named(spec), steps)
    items = _items(spec)
    if not any(isinstance(item, Sequence) for item in items):
        return (_triple(spec),) * steps
    triples = tuple(_triple(item) for item in items)
    if len(triples) != steps:
        raise ValueError(
            f"ns_coefficients has {len(triples)} triples for {steps} steps; give one triple for "
            "all steps, one for each, or change ns_steps"
        )
    return triples


def _named(name: str) -> tuple[Triple, ...]:
    if name not in SETS:
        raise ValueError(f"ns_coefficients has no set {name!r}; the sets are {', '.join(SETS)}")
    return SETS[name]


def _repeat_last(triples: tuple[Triple, ...], steps: int) -> tuple[Triple, ...]:
    return (triples + triples[-1:] * steps)[:steps]


def _triple(value: object) -> Triple:
    try:
        a, b, c = (float(number) for number in _items(value))
    except (TypeError, ValueError):
        raise _malformed(value) from None
    if not all(map(isfinite, (a, b, c))):
        raise _malformed(value)
    return a, b, c


def _items(value: object) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _malformed(value)
    return value


def _malformed(value: object) -> ValueError:
    return ValueError(
        f"ns_coefficients must be one of {', '.join(SETS)}, a triple of finite numbers, or a list "
        f"of such triples, but has {value!r}"
    )

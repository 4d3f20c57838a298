"""The named sets of coefficients, and how what a user gives becomes one triple a step."""

import subprocess
import sys

import pytest

from core_plugin_muon.coefficients import SETS, schedule

FIRST, SECOND = (3.0, -4.0, 2.0), (1.5, -0.5, 0.0)


def after(value: float, triples: tuple[tuple[float, float, float], ...]) -> float:
    for a, b, c in triples:
        value = a * value + b * value**3 + c * value**5
    return value


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("keller_jordan", 0.68, 1.13),
        ("polar_express", 0.87, 1.12),
        ("you", 0.98, 1.03),
        ("cans", 0.84, 1.11),
    ],
)
def test_five_steps_bring_singular_values_near_one(name: str, low: float, high: float) -> None:
    values = [after(0.02 + 0.98 * i / 2000, schedule(name, 5)) for i in range(2001)]
    assert (min(values), max(values)) == pytest.approx((low, high), abs=0.01)


@pytest.mark.parametrize("name", SETS)
def test_a_singular_value_that_rounding_made_too_large_stays_small(name: str) -> None:
    """Rounding to bfloat16 makes up to 1.008 of the one singular value of a matrix of rank one."""
    assert max(after(1 + i / 1e5, schedule(name, 5)) for i in range(800)) < 1.2


def test_the_sets_are_the_published_ones() -> None:
    assert list(SETS) == ["keller_jordan", "polar_express", "you", "cans"]
    assert schedule("keller_jordan", 5) == ((3.4445, -4.7750, 2.0315),) * 5
    assert schedule("you", 5)[0] == (4.0848, -6.8946, 2.9270)
    a, b, c = schedule("cans", 5)[0]
    assert (1.02 * a, 1.02**3 * b, 1.02**5 * c) == pytest.approx((8.4703, -25.1081, 18.6293))
    # As rounded in NVIDIA's Emerging-Optimizers, safety factor included.
    for triple, expected in (
        (SETS["polar_express"][0], (8.2051, -22.9019, 16.4607)),
        (SETS["polar_express"][6], (1.8564, -1.2132, 0.3568)),
        (SETS["polar_express"][7], (1.8750, -1.2500, 0.3750)),
    ):
        assert triple == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", SETS)
def test_a_named_set_is_cut_or_repeats_its_last_triple(name: str) -> None:
    triples = SETS[name]
    for steps in (1, len(triples), len(triples) + 3):
        result = schedule(name, steps)
        assert len(result) == steps
        assert result[: len(triples)] == triples[:steps]
        assert set(result[len(triples) :]) <= {triples[-1]}


def test_one_triple_is_for_all_steps() -> None:
    assert schedule(FIRST, 3) == (FIRST,) * 3
    assert schedule([3, -4, 2], 1) == (FIRST,)


def test_a_list_has_a_triple_for_each_step() -> None:
    assert schedule([list(FIRST), SECOND], 2) == (FIRST, SECOND)
    with pytest.raises(ValueError, match="has 2 triples for 3 steps"):
        schedule([FIRST, SECOND], 3)


@pytest.mark.parametrize("spec", ["keller_jordan", FIRST, [FIRST, SECOND]])
def test_a_schedule_is_its_own_schedule(spec: object) -> None:
    resolved = schedule(spec, 2)
    assert schedule(resolved, 2) == resolved


def test_an_unknown_name_is_an_error_that_names_the_sets() -> None:
    with pytest.raises(ValueError, match="'jordan'; the sets are keller_jordan, polar_express"):
        schedule("jordan", 5)


@pytest.mark.parametrize(
    "spec",
    [
        None,
        5,
        [],
        [1.0, 2.0],
        [1.0, 2.0, "x"],
        [1.0, 2.0, None],
        [1.0, 2.0, float("nan")],
        [1.0, 2.0, float("inf")],
        [FIRST, 4.0],
        [FIRST, [1.0, 2.0]],
        [[FIRST], [SECOND]],
    ],
)
def test_what_is_no_triple_is_an_error(spec: object) -> None:
    with pytest.raises(ValueError, match="ns_coefficients must be one of keller_jordan"):
        schedule(spec, 2)


def test_does_not_import_torch() -> None:
    code = "import sys, core_plugin_muon.coefficients; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

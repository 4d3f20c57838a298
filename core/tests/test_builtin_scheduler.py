import itertools
import math
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_plugin import ConfigError
from core_plugin.types import SchedulerPlugin

NAMES = ["constant", "linear", "cosine", "wsd"]
PEAKS = (0.5, 3.0)

timeless = settings(deadline=None)  # the first example imports what the others find


def make_params(name, **config):
    route = SchedulerPlugin(name)
    return route.parse_params(config, route.params_type())


def make(name, steps, **config):
    optimizer = torch.optim.SGD(
        [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in PEAKS]
    )
    return optimizer, SchedulerPlugin(name)(optimizer, make_params(name, **config), steps=steps)


def advance(optimizer, scheduler, steps):
    """The rate of each of the next steps, as a fraction of the peak."""
    factors = []
    for _ in range(steps):
        rates = [
            group["lr"] / peak for group, peak in zip(optimizer.param_groups, PEAKS, strict=True)
        ]
        assert rates[0] == pytest.approx(rates[1])
        factors.append(rates[0])
        optimizer.step()
        scheduler.step()
    return factors


def factors(name, steps, **config):
    return advance(*make(name, steps, **config), steps)


@st.composite
def runs(draw):
    """The steps of a run, and parameters that fit it and leave it a step to decay in."""
    steps = draw(st.integers(2, 60))
    warmup = draw(st.integers(0, steps - 1))
    return steps, {"warmup_steps": warmup, "min_ratio": draw(st.floats(0, 1))}


def split(run, values):
    """The factors of the warm-up, and those from the peak on."""
    peak = max(run["warmup_steps"] - 1, 0)
    return values[:peak], values[peak:]


@pytest.mark.parametrize("name", NAMES)
@timeless
@given(run=runs())
def test_the_rate_grows_stays_below_its_peak_and_ends_at_the_minimum(name, run):
    steps, config = run
    if name == "constant":
        config = {**config, "min_ratio": 1.0}
    given_to = {k: v for k, v in config.items() if name != "constant" or k == "warmup_steps"}
    values = factors(name, steps, **given_to)
    growing, falling = split(config, values)
    warmup = config["warmup_steps"]
    assert growing == pytest.approx([(k + 1) / warmup for k in range(len(growing))])
    assert falling[0] == pytest.approx(1)
    assert falling[-1] == pytest.approx(config["min_ratio"])
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(falling))


@timeless
@given(run=runs())
def test_linear_is_the_line_between_both_ends(run):
    steps, config = run
    _, falling = split(config, factors("linear", steps, **config))
    assert falling == pytest.approx(numpy.linspace(1, config["min_ratio"], len(falling)))


@timeless
@given(run=runs())
def test_cosine_is_half_a_wave_between_both_ends(run):
    steps, config = run
    _, falling = split(config, factors("cosine", steps, **config))
    middle, height = (1 + config["min_ratio"]) / 2, (1 - config["min_ratio"]) / 2
    angles = numpy.linspace(0, math.pi, len(falling))
    assert falling == pytest.approx(middle + height * numpy.cos(angles))


@timeless
@given(run=runs(), data=st.data())
def test_wsd_stays_at_the_peak_until_its_last_steps(run, data):
    steps, config = run
    after_peak = steps - 1 - max(config["warmup_steps"] - 1, 0)
    decay = data.draw(st.integers(1, after_peak))
    _, falling = split(config, factors("wsd", steps, decay_steps=decay, **config))
    expected = [1.0] * (after_peak - decay) + list(
        numpy.linspace(1, config["min_ratio"], decay + 1)
    )
    assert falling == pytest.approx(expected)


def test_wsd_decays_over_a_tenth_of_the_run_unless_told():
    assert factors("wsd", 30, warmup_steps=10) == pytest.approx(
        [*numpy.linspace(0.1, 1, 10), *[1] * 17, 2 / 3, 1 / 3, 0]
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (1, 1), (5, 5), (8, 5)])
def test_a_run_that_is_all_warm_up_has_no_decay(name, warmup, steps):
    expected = [(k + 1) / max(warmup, 1) for k in range(steps)]
    assert factors(name, steps, warmup_steps=warmup) == pytest.approx(expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_last_rate_holds_after_the_end(name):
    optimizer, scheduler = make(name, 10, warmup_steps=2)
    values = advance(optimizer, scheduler, 13)
    assert values[10:] == [values[9]] * 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("at", [0, 3, 8])
def test_a_resumed_schedule_continues_exactly(name, at):
    whole = factors(name, 12, warmup_steps=4)
    optimizer, scheduler = make(name, 12, warmup_steps=4)
    first = advance(optimizer, scheduler, at)
    resumed_optimizer, resumed = make(name, 12, warmup_steps=4)
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert first + advance(resumed_optimizer, resumed, 12 - at) == whole


@pytest.mark.parametrize("name", NAMES)
def test_its_state_is_plain_data(name, tmp_path):
    _, scheduler = make(name, 12, warmup_steps=4)
    torch.save(scheduler.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == scheduler.state_dict()


@pytest.mark.parametrize("name", NAMES)
def test_a_warm_up_that_is_longer_than_the_run_is_a_fault(name):
    run = SimpleNamespace(train=SimpleNamespace(steps=10))
    assert list(make_params(name, warmup_steps=10).faults(run)) == []
    (fault,) = make_params(name, warmup_steps=11).faults(run)
    assert "warmup_steps (11)" in fault
    assert "train.steps (10)" in fault


def test_a_warm_up_and_a_decay_that_do_not_fit_the_run_are_a_fault():
    run = SimpleNamespace(train=SimpleNamespace(steps=10))
    assert list(make_params("wsd", warmup_steps=4, decay_steps=6).faults(run)) == []
    (fault,) = make_params("wsd", warmup_steps=4, decay_steps=7).faults(run)
    assert "decay_steps (7)" in fault


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("constant", {"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ("linear", {"min_ratio": 1.5}, r"min_ratio must be in \[0, 1\], got 1.5"),
        ("cosine", {"min_ratio": -0.1}, r"min_ratio must be in \[0, 1\], got -0.1"),
        ("wsd", {"decay_steps": 0}, "decay_steps must be at least 1, got 0"),
        ("wsd", {"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
    ],
)
def test_parameters_out_of_range_are_named(name, config, message):
    with pytest.raises(ConfigError, match=message):
        make_params(name, **config)

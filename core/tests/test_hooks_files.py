import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pluggy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from core_plugin import PluginUnavailableError
from core_plugin.testing.children import run_script
from core_plugin.types import HookPlugin, Run
from core_plugin.types.hook import Events

LIGHT = """
import sys
from core_plugin.types import HookPlugin

for name in ("jsonl", "plot", "progress", "sample", "tensorboard"):
    route = HookPlugin(name)
    route.parse_params({}, route.params_type())
heavy = {"torch", "numpy", "matplotlib", "tensorboard", "rich", "tokenizers"}
print(*sorted(heavy & sys.modules.keys()))
"""


def begin(name, directory, start=0, steps=100, **config):
    """The run of one process with one hook, and the events as the loop sends them."""
    run = Run(directory, {}, 0, 1, steps, start, None, None, None, step=start)
    route = HookPlugin(name)
    manager = pluggy.PluginManager("core_plugin")
    manager.add_hookspecs(Events)
    manager.register(route(route.parse_params(config, route.params_type()), run))
    manager.check_pending()
    manager.hook.on_start(run=run)
    return run, manager.hook


def metrics(step):
    return {
        "step": step,
        "loss": 1 + 5 / step,
        "grad_norm": 0.5,
        "lr": 0.02 - step / 1e4,
        "tokens": 128 * step,
        "tokens_per_second": 12345.0 + step,
        "seconds": step / 3,
    }


def log(run, hooks, steps):
    for step in steps:
        run.step = step
        hooks.on_step(run=run)
        hooks.on_log(run=run, metrics=metrics(step))


def records(directory, name="metrics.jsonl"):
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def test_the_entry_points_are_light():
    ran = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.strip()) == (0, ""), ran.stderr


# jsonl


def test_each_log_is_in_the_file_as_soon_as_it_is_made(tmp_path):
    run, hooks = begin("jsonl", tmp_path)
    for step in (10, 20, 30):
        log(run, hooks, [step])
        assert records(tmp_path) == [metrics(s) for s in range(10, step + 1, 10)]


def test_a_fresh_run_begins_a_new_file_of_the_name_it_is_given(tmp_path):
    log(*begin("jsonl", tmp_path, file="mine"), [1, 2])
    log(*begin("jsonl", tmp_path, file="mine"), [5])
    assert records(tmp_path, "mine") == [metrics(5)]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@given(every=st.integers(1, 3), logs=st.integers(0, 6), data=st.data())
def test_killed_anywhere_and_resumed_the_file_has_each_step_once(every, logs, data):
    before = range(every, every * logs + 1, every)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        log(*begin("jsonl", path.parent), before)
        written = path.read_bytes()
        cut = data.draw(st.integers(0, len(written)), "cut")
        path.write_bytes(written[:cut])
        start = data.draw(st.integers(1, every * logs + 1), "start")
        after = range(start + 1, start + 4)
        log(*begin("jsonl", path.parent, start), after)
        # A line that lacks no more than its newline is whole.
        whole = before[: written[: cut + 1].count(b"\n")]
        kept = [*(step for step in whole if step <= start), *after]
        assert records(path.parent) == [metrics(step) for step in kept]


def test_the_lines_that_are_kept_are_never_missing(tmp_path, monkeypatch):
    log(*begin("jsonl", tmp_path), [1, 2, 3])

    def killed(*paths):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            begin("jsonl", tmp_path, start=2)
    assert records(tmp_path) == [metrics(1), metrics(2), metrics(3)]
    begin("jsonl", tmp_path, start=2)
    assert records(tmp_path) == [metrics(1), metrics(2)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_what_is_no_log_is_dropped(tmp_path):
    lines = ["7", "[]", "{}", '{"step": "1"}', '{"step": 1, "loss": 2.0}', "", "\0", "{"]
    (tmp_path / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b"\xff")
    begin("jsonl", tmp_path, start=1)
    assert records(tmp_path) == [{"step": 1, "loss": 2.0}]


@pytest.mark.parametrize(("hook", "field"), [("jsonl", "file"), ("plot", "metrics")])
@pytest.mark.parametrize("value", ["", "..", "a/b", "/tmp/a"])
def test_a_file_outside_of_the_run_is_refused(hook, field, value):
    with pytest.raises(ValueError, match=rf"{field} must be the name .*got '{value}'"):
        HookPlugin(hook).params_type()(**{field: value})


# tensorboard


def scalars(directory):
    """The steps and values of each tag, as TensorBoard shows them."""
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


def expected(steps):
    names = metrics(1).keys() - {"step"}
    return {name: {s: pytest.approx(metrics(s)[name]) for s in steps} for name in names}


@pytest.mark.parametrize(("last", "more"), [("on_end", {}), ("on_error", {"error": ValueError()})])
def test_tensorboard_shows_every_metric_after_the_last_event(tmp_path, last, more):
    threads = threading.active_count()
    run, hooks = begin("tensorboard", tmp_path)
    log(run, hooks, [10, 20, 30])
    getattr(hooks, last)(run=run, **more)
    assert threading.active_count() == threads
    assert scalars(tmp_path) == expected([10, 20, 30])


def test_tensorboard_has_everything_when_the_process_goes_after_a_checkpoint(tmp_path):
    run_script(Path(__file__).with_name("hooks_process.py"), "stop", tmp_path)
    steps = range(1, 51)
    assert scalars(tmp_path) == {"loss": dict.fromkeys(steps, 1.0), "lr": dict.fromkeys(steps, 0.5)}


@pytest.mark.parametrize(("start", "left"), [(0, []), (20, [10, 20]), (25, [10, 20])])
def test_tensorboard_hides_the_steps_that_are_taken_again(tmp_path, start, left):
    run, hooks = begin("tensorboard", tmp_path)
    log(run, hooks, [10, 20, 30, 40])
    hooks.on_error(run=run, error=ValueError())
    run, hooks = begin("tensorboard", tmp_path, start=start)
    log(run, hooks, [start + 1, start + 2])
    hooks.on_end(run=run)
    assert scalars(tmp_path) == expected([*left, start + 1, start + 2])


@pytest.mark.parametrize("name", ["tensorboard", "plot"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_package_is_named_on_every_rank(tmp_path, monkeypatch, name, rank):
    monkeypatch.setitem(sys.modules, {"plot": "matplotlib"}.get(name, name), None)
    route = HookPlugin(name)
    run = Run(tmp_path, {}, rank, 2, 3, 0, None, None, None)
    with pytest.raises(PluginUnavailableError, match=rf"pip install core-plugin\[{name}\]"):
        route(route.params_type()(), run)


# plot


def drawn(directory):
    return (directory / "plot.png").read_bytes()


def coloured(picture):
    """The share of each panel's pixels that have a colour."""
    height = len(picture)
    strips = np.split(picture[..., :3], [height * 9 // 20, height * 7 // 10])
    return [float((np.ptp(strip, axis=-1) > 0.2).mean()) for strip in strips]


@pytest.mark.parametrize("steps", [[1], range(10, 60, 10), range(1, 301)])
def test_a_picture_has_a_line_in_each_of_three_panels(tmp_path, steps):
    run, hooks = begin("plot", tmp_path)
    log(run, hooks, steps)
    hooks.on_end(run=run)
    picture = imread(tmp_path / "plot.png")
    assert picture.shape == (960, 960, 4)
    assert all(0.00001 < share < 0.1 for share in coloured(picture)), coloured(picture)
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]


def test_the_lines_are_those_of_the_metrics(tmp_path, monkeypatch):
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: figures.append(f) or save(f, *a, **k))
    run, hooks = begin("plot", tmp_path)
    log(run, hooks, range(1, 101))
    hooks.on_checkpoint(run=run, path=tmp_path)
    (figure,) = figures
    names = ("loss", "lr", "tokens_per_second")
    values = [np.array([metrics(step)[name] for step in range(1, 101)]) for name in names]
    for panel, value in zip(figure.axes, values, strict=True):
        assert np.array_equal(panel.lines[0].get_xdata(), np.arange(1, 101))
        assert np.array_equal(panel.lines[0].get_ydata(), value)
    smooth = figure.axes[0].lines[1].get_ydata()
    reach = 5
    assert smooth[50] == pytest.approx(values[0][50 - reach : 51 + reach].mean())
    assert smooth[2] == pytest.approx(values[0][:5].mean())
    assert smooth[-1] == pytest.approx(values[0][-1 - reach :].mean())
    labels = [panel.get_ylabel() for panel in figure.axes]
    assert labels == ["loss (nats per token)", "learning rate", "throughput (tokens/s)"]
    assert figure.axes[2].get_xlabel() == "optimizer step"
    legend = figure.axes[0].get_legend().get_texts()
    assert [text.get_text() for text in legend] == ["loss", "mean of 11 logs"]


def test_after_resuming_the_picture_is_that_of_the_whole_run(tmp_path):
    whole, parts, alone = (tmp_path / name for name in ("whole", "parts", "alone"))
    for directory in (whole, parts, alone):
        directory.mkdir()
    run, hooks = begin("plot", whole)
    log(run, hooks, range(1, 41))
    hooks.on_end(run=run)
    log(*begin("jsonl", parts), range(1, 31))
    for directory in (parts, alone):
        run, hooks = begin("plot", directory, start=20)
        log(run, hooks, range(21, 41))
        hooks.on_end(run=run)
    assert drawn(parts) == drawn(whole)
    assert drawn(alone) != drawn(whole)


def test_a_fresh_run_does_not_draw_an_earlier_one(tmp_path):
    log(*begin("jsonl", tmp_path), [1, 2, 3])
    run, hooks = begin("plot", tmp_path)
    hooks.on_checkpoint(run=run, path=tmp_path)
    assert not (tmp_path / "plot.png").exists()


def test_a_picture_that_could_not_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    run, hooks = begin("plot", tmp_path)
    log(run, hooks, [1, 2])
    hooks.on_checkpoint(run=run, path=tmp_path)
    first = drawn(tmp_path)

    def full(figure, path, **options):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    log(run, hooks, [3])
    with pytest.raises(OSError, match="No space"):
        hooks.on_checkpoint(run=run, path=tmp_path)
    assert drawn(tmp_path) == first


def test_drawing_leaves_the_rest_of_matplotlib_alone(tmp_path):
    program = (
        "import sys; from pathlib import Path; from core_plugin.builtin.hooks.plot import draw; "
        "draw([(1, 2.0, 0.1, 3.0)], Path(sys.argv[1])); print('matplotlib.pyplot' in sys.modules)"
    )
    command = [sys.executable, "-W", "error", "-c", program, str(tmp_path / "plot.png")]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.strip()) == (0, "False"), ran.stderr

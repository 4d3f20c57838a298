import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from core_plugin.types import HookPlugin, Run

SCRIPT = Path(__file__).with_name("hooks_process.py")
HIDE, SHOW, BACK = "\x1b[?25l", "\x1b[?25h", "\r"
LINE = re.compile(r"step (\d)/6  loss [\d.]+  lr 2.0e-02  12.3k tokens/s  (-:--|0:0[01]) left")
FINAL = re.compile(r"step 6/6  loss 1.667  lr 2.0e-02  12.3k tokens/s  0:0\d < 0:00 left ━+")


def command(directory, **happens):
    return [
        sys.executable,
        "-W",
        "error",
        str(SCRIPT),
        "watch",
        str(directory),
        json.dumps(happens),
    ]


def environment(**more):
    ours = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **more}


def on_a_pipe(directory, env=None, **happens):
    done = subprocess.run(
        command(directory, **happens), env=env or environment(), capture_output=True, check=True
    )
    assert done.stderr == b""
    return done.stdout.decode()


def on_a_terminal(directory, columns=100, env=None, **happens):
    """What a terminal of this width gets to see, with its control sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        command(directory, **happens),
        env=env or environment(),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 65536):
            seen += chunk
    except OSError:  # what Linux says when the other side is closed
        pass
    os.close(ours)
    assert process.wait() == 0, seen.decode()
    return seen.decode()


def plain(text):
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text)


def frames(seen):
    """The states of the live line, one list for each time that it was open."""
    opened = [plain(part.split(SHOW)[0]).split(BACK) for part in seen.split(HIDE)[1:]]
    return [[state for state in states if state] for states in opened]


def test_without_a_terminal_each_log_and_checkpoint_is_a_plain_line(tmp_path):
    lines = on_a_pipe(tmp_path, steps=6, every=4).splitlines()
    assert lines[4] == "saved runs/step-00000004"
    assert lines[-1] == "the run is over"
    steps = [LINE.fullmatch(line) for line in lines[:4] + lines[5:-1]]
    assert [match and int(match[1]) for match in steps] == [1, 2, 3, 4, 5, 6]
    assert [match and match[2] for match in steps] == ["-:--", *["0:01"] * 4, "0:00"]


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"])
def test_a_log_file_gets_plain_lines_even_when_colours_are_forced(tmp_path, variable):
    text = on_a_pipe(tmp_path, environment(**{variable: "1"}), steps=6)
    assert "\x1b" not in text
    assert text.count("12.3k tokens/s") == 6


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(tmp_path):
    lines = on_a_terminal(tmp_path, env=environment(TERM="dumb"), steps=6, every=7).splitlines()
    assert [bool(LINE.fullmatch(line)) for line in lines] == [True] * 6 + [False]


def test_lines_come_no_faster_than_they_may_but_the_last_comes(tmp_path):
    lines = on_a_pipe(tmp_path, steps=6, every=7, params={"min_seconds": 60}).splitlines()
    assert [line.split()[1] for line in lines] == ["1/6", "6/6", "run"]


def test_the_time_left_is_told_from_the_steps_since_resuming(tmp_path):
    lines = on_a_pipe(tmp_path, steps=1010, start=1000, seconds=0.25, every=2000).splitlines()
    third = re.fullmatch(r"step 1003/1010  .*  0:0(\d) left", lines[2])
    assert third
    assert 2 <= int(third[1]) <= 4


@pytest.mark.parametrize(("ends", "start"), [("ends", 0), ("fails", 3)])
def test_on_a_terminal_one_line_is_live_until_the_run_ends_or_fails(tmp_path, ends, start):
    seen = on_a_terminal(tmp_path, steps=6, start=start, every=7, ends=ends)
    assert (seen.count(HIDE), seen.count(SHOW)) == (1, 1)
    (states,) = frames(seen)
    assert "\n" not in "".join(states[:-1])
    assert re.fullmatch(rf"step {start}/6  starting  0:00 < -:-- left [━╸]+", states[0])
    assert FINAL.fullmatch(states[-2])
    assert {len(state) for state in states[:-1]} == {100}
    assert states[-1] == "\n"
    assert seen.endswith(f"\r\n{SHOW}the run is over\r\n")


def test_a_checkpoint_is_a_line_of_its_own_after_which_nothing_is_open(tmp_path):
    """A run that a signal stops gets no event after its last checkpoint."""
    seen = on_a_terminal(tmp_path, steps=6, every=3, ends="stopped")
    assert (seen.count(HIDE), seen.count(SHOW)) == (2, 2)
    assert [states[-2].split("  ")[0] for states in frames(seen)] == ["step 3/6", "step 6/6"]
    assert f"\r\n{SHOW}saved runs/step-00000003\r\n{HIDE}" in seen
    assert seen.endswith(f"\r\n{SHOW}saved runs/step-00000006\r\nthe run is over\r\n")


@pytest.mark.parametrize(("columns", "final"), [(1, ""), (9, "step 6/"), (60, FINAL.pattern[:20])])
def test_a_narrow_terminal_still_has_one_line(tmp_path, columns, final):
    (states,) = frames(on_a_terminal(tmp_path, columns, steps=6, every=7))
    assert all(len(state) <= columns and "\n" not in state for state in states[:-1])
    assert states[-1] == "\n"
    assert states[-2].startswith(final)


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_a_wrong_pause_is_named(value):
    with pytest.raises(ValueError, match=rf"min_seconds .*got {value}"):
        HookPlugin("progress").params_type()(min_seconds=value)


@pytest.mark.parametrize("name", ["progress", "jsonl", "tensorboard", "plot"])
def test_only_the_first_rank_watches(name, tmp_path):
    route = HookPlugin(name)
    run = Run(tmp_path, {}, 1, 2, 3, 0, None, None, None)
    assert route(route.params_type()(), run) is None
    assert list(tmp_path.iterdir()) == []

"""``core-plugin test``: how a plugin is named, and what its user is told of cases left out."""

import re

import pytest

from core_plugin.config import split_name


def test_cases_that_were_left_out_are_told_in_one_line(environment) -> None:
    options = ["--level", "1", "-k", "a_deep_copy_is_independent"]
    done = environment.run("-m", "core_plugin", "test", "device/cpu", *options, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.partition("= conformance =")[2].strip("= \n").splitlines()
    assert [line.split()[0] for line in table[:2]] == ["case", "storage/a_deep_copy_is_independent"]
    (left_out,) = [line for line in table if line.startswith("not run, as it was deselected: ")]
    assert re.search(r", .*, .* and \d+ more$", left_out)
    assert len(table) < 9
    assert "\ndevice:cpu (" in done.stdout


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("device:cpu", ("device", "cpu")),
        ("device/cpu", ("device", "cpu")),
        ("device:acme:cpu", ("device", "acme:cpu")),
        ("device/acme:cpu", ("device", "acme:cpu")),
        ("devices/cpu", ("devices", "cpu")),
        ("acme:cpu", ("", "acme:cpu")),
        ("cpu", ("", "cpu")),
    ],
)
def test_a_type_stands_before_a_colon_or_a_slash(text, split) -> None:
    assert split_name(text) == split

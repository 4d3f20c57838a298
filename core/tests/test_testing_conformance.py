"""Running a conformance suite: what its user sees, on the CPU and on devices with known faults."""

import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from forked_command import run_command

DEVICE = """
import dataclasses, os, time
from core_plugin.builtin.device import CPU
from core_plugin.privateuse1 import DeviceCapabilities


class Overrated(CPU):
    '''Declares what it cannot do.'''

    @staticmethod
    def backend(params):
        backend = CPU.backend(params)
        capabilities = dataclasses.replace(backend.capabilities, event_timing=True)
        return dataclasses.replace(backend, capabilities=capabilities)


class Modest(CPU):
    '''Declares less than it can do, and has no collective library.'''

    @staticmethod
    def backend(params):
        capabilities = DeviceCapabilities(generator=True)
        return dataclasses.replace(
            CPU.backend(params), capabilities=capabilities, collective_backend=None
        )


class Ending(CPU):
    '''Ends its process.'''

    @staticmethod
    def device(params, local_rank):
        os._exit(7)


class Malformed(CPU):
    @staticmethod
    def backend(params):
        return dataclasses.replace(CPU.backend(params), name="dev1")


class Absent(CPU):
    '''Cannot run here.'''

    @staticmethod
    def unavailable(params):
        return "the driver is not loaded"
"""
TIMING = "streams/the_time_of_work_is_not_negative"


@pytest.fixture
def suite(environment):
    """Runs ``core-plugin test``: the exit code, the JSON report, and what is printed."""
    environment.site().add(
        "acme-devices",
        modules={"acme.py": DEVICE},
        device="\n".join(
            f"{name} = acme:{name.capitalize()}"
            for name in ("overrated", "modest", "ending", "absent", "malformed")
        ),
    )

    def run(*arguments: str) -> tuple[int, dict, str]:
        report = environment.root / "report.json"
        report.unlink(missing_ok=True)
        options = ["test", *arguments, "--json", str(report)]
        variables = os.environ | {"OMP_NUM_THREADS": "1"}
        code, told = run_command(options, environment.root, variables)
        found = json.loads(report.read_text()) if report.exists() else {}
        return code, found, told

    return run


def by_name(report: dict) -> dict[str, dict]:
    return {case["name"]: case for case in report["cases"]}


def test_a_declared_capability_that_fails_is_a_failure(suite):
    code, report, told = suite("device:overrated", "-k", "the_time_of_work", "--level", "1")
    case = by_name(report)[TIMING]
    assert (code, case["result"], case["capability"]) == (1, "fail", "event_timing"), told
    assert case["says"] in told
    assert "Traceback" in case["reason"]
    failed = {name for name, case in by_name(report).items() if case["result"] == "fail"}
    assert failed == {TIMING}


def test_an_exception_is_shown_with_its_reason_and_strict(suite):
    asked = ("device:overrated", "-k", "the_time_of_work or a_deep_copy_is_independent")
    code, report, told = suite(*asked, "--except", f"{TIMING}=erratum 12")
    assert code == 0
    assert by_name(report)[TIMING]["result"] == "excepted"
    assert report["exceptions"] == {TIMING: "erratum 12"}
    assert f"excepted: {TIMING}: erratum 12" in told
    code, report, told = suite(*asked, "--except", "storage/a_deep_copy_is_independent=erratum 13")
    assert code == 1
    assert "pass: it needs no exception (erratum 13)" in told


@pytest.mark.parametrize(
    "excepted", ["storage/a_deep_copy_is_independend=a typo", "storage/a_deep_copy_is_independent"]
)
def test_an_exception_needs_a_case_and_a_reason(suite, excepted):
    code, _, told = suite("device:cpu", "--except", excepted)
    assert code == 2
    assert "did you mean storage/a_deep_copy_is_independent?" in told or "write CASE=REASON" in told
    assert "Traceback" not in told


def test_what_is_not_declared_fails_cleanly_or_is_a_warning(suite):
    code, report, told = suite("device:modest", "-k", "a_generator_of_the_device or recurrent")
    assert code == 0
    results = {name: case["result"] for name, case in by_name(report).items()}
    assert results["random/a_generator_of_the_device"] == "pass"
    assert "works, though recurrent_layers is not declared: layers/recurrent_layers[" in told


def test_without_a_collective_library_there_is_level_1_alone(suite):
    _, report, _ = suite("device:modest", "-k", "collectives")
    case = by_name(report)["collectives/all_reduce[sum]"]
    assert (case["result"], case["level"]) == ("not declared", 2)
    assert case["reason"] == "no collective library is declared"


def test_a_process_that_ends_is_a_failed_case(suite):
    code, report, _ = suite("device:ending", "-k", "a_deep_copy_is_independent")
    assert code == 1
    case = by_name(report)["storage/a_deep_copy_is_independent"]
    assert case["result"] == "fail"
    assert "the process ended: exit code 7" in case["reason"]


def test_a_device_that_cannot_run_here_says_why(suite):
    code, report, _ = suite("device:absent", "-k", "a_deep_copy_is_independent")
    assert code == 1
    assert (
        "the driver is not loaded"
        in by_name(report)["storage/a_deep_copy_is_independent"]["reason"]
    )


def test_cases_that_are_deselected_are_told_and_their_level_is_not_reached(suite):
    _, report, told = suite("device:cpu", "-k", "a_deep_copy_is_independent")
    results = [case["result"] for case in report["cases"]]
    assert results.count("pass") == 1
    assert results.count("not run") == len(results) - 1
    assert {c["reason"] for c in report["cases"] if c["result"] == "not run"} == {
        "it was deselected"
    }
    assert "level reached: 0" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["device"], "write TYPE:NAME, such as device:fake"),
        (["device:nosuch"], "no DevicePlugin is called 'nosuch'"),
        (["hook:progress"], "there is no conformance suite for plugins of the type 'hook'"),
        (["device:cpu", "--level", "4"], "there is no level 4; the levels are (1, 2, 3)"),
        (["device:cpu", "threds=1"], "did you mean threads?"),
        (["device:cpu", "threads=0"], "threads must be at least 1"),
        (["device:malformed"], "reads no digits"),
    ],
)
def test_wrong_arguments(suite, arguments, told):
    code, _, output = suite(*arguments)
    assert code == 2
    assert told in output
    assert "Traceback" not in output


def pytest_run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_pytest_runs_the_suite_beside_a_packages_own_tests(tmp_path):
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    options = ["--core-plugin", "device:cpu", "--core-plugin-level", "1"]
    options += [
        "-k",
        "test_own or a_deep_copy_is_independent",
        "--junit-xml",
        "junit.xml",
        "test_own.py",
    ]
    done = pytest_run(tmp_path, *options)
    assert "storage/a_deep_copy_is_independent" in done.stdout, done.stdout + done.stderr
    tree = ElementTree.parse(tmp_path / "junit.xml")
    names = {case.get("name") for case in tree.iter("testcase")}
    assert names == {"test_own", "test_a_deep_copy_is_independent"}
    properties = {p.get("name"): p.get("value") for p in tree.iter("property")}
    assert properties["core-plugin plugin"] == "device:cpu"
    assert properties["core-plugin level"] == "0"
    assert properties["core-plugin torch"] == torch.__version__


def test_markers_choose_cases(tmp_path):
    def chosen(expression: str) -> str:
        options = ["--collect-only", "-q", "--core-plugin", "device:cpu", "-m", expression]
        return pytest_run(tmp_path, *options).stdout

    assert "test_storage.py" in chosen("cpu and hardware")
    assert "test_storage.py" not in chosen("accelerator")
    offline = chosen("not hardware")
    assert "test_names.py" in offline
    assert "test_storage.py" not in offline


def test_a_folder_that_is_not_there_is_told_before_anything_runs(tmp_path):
    done = pytest_run(tmp_path, "--core-plugin=device:cpu", "--core-plugin-report=no/report.json")
    assert done.returncode == 4
    assert "the report cannot be written: no/report.json is a folder, or in none" in done.stderr


def test_other_processes_of_pytest_are_refused(tmp_path):
    done = pytest_run(tmp_path, "--core-plugin", "device:cpu", "-n", "2")
    assert done.returncode == 4
    assert "the suite has processes of its own; leave -n out" in done.stderr


def test_cases_that_vanish_are_told_and_are_a_failure(tmp_path):
    """A project's settings and hooks can take cases away, and not without being seen."""
    (tmp_path / "pytest.ini").write_text("[pytest]\npython_files = check_*.py\n")
    (tmp_path / "conftest.py").write_text(
        "import pytest\n"
        "@pytest.hookimpl(wrapper=True, tryfirst=True)\n"
        "def pytest_collection_modifyitems(items):\n"
        "    items[:] = [i for i in items if 'deep_copy' in i.name]\n"
        "    return (yield)\n"
    )
    options = ["--core-plugin=device:cpu", "--core-plugin-report=report.json"]
    done = pytest_run(tmp_path, *options)
    report = json.loads((tmp_path / "report.json").read_text())
    results = [case["result"] for case in report["cases"]]
    assert done.returncode == 1, done.stdout
    assert results.count("pass") == 1
    assert results.count("not run") == len(results) - 1 >= 100
    assert report["level"] == 0


def test_two_plugins_in_one_run_are_refused(tmp_path):
    done = pytest_run(tmp_path, "--core-plugin", "device:cpu", "--core-plugin", "device:cuda")
    assert done.returncode == 4
    assert "one plugin a run, not device:cpu, device:cuda" in done.stderr


@pytest.mark.parametrize(
    ("marks", "told"),
    [
        ("level(7)", "there is no level 7"),
        ("level(1), pytest.mark.requires('steams')", "there is no capability 'steams'"),
        ("level(1), pytest.mark.only('gpu')", "there is no kind 'gpu'"),
    ],
)
def test_a_case_that_is_declared_wrongly_is_refused(tmp_path, marks, told):
    """A copy of the suite with one more case."""
    import core_plugin

    source = Path(core_plugin.__file__).parent
    copied = tmp_path / "site" / "core_plugin"
    shutil.copytree(source, copied, ignore=shutil.ignore_patterns("test_*.py", "__pycache__"))
    (copied / "testing/device/test_wrong.py").write_text(
        f"import pytest\npytestmark = [pytest.mark.{marks}]\ndef test_it(device): pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "core_plugin", "test", "device:cpu"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(copied.parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert told in done.stdout + done.stderr


def test_a_conftest_cannot_replace_what_a_case_is_given(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import pytest\n@pytest.fixture\ndef device():\n    raise RuntimeError('replaced')\n"
    )
    done = pytest_run(tmp_path, "--core-plugin", "device:cpu", "-k", "a_deep_copy_is_independent")
    assert "1 passed" in done.stdout, done.stdout

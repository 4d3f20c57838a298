"""Suites: by the command, or one after the other in a process that is there for many tests."""

from __future__ import annotations

import json
import os
import site
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from forked_command import run_command

from core_plugin import testing

Suite = Callable[..., tuple[int, list[dict]]]


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., tuple[dict, str]]:
    """Runs a suite by the command, which must pass: the report, and what it printed."""

    def run(*arguments: str) -> tuple[dict, str]:
        file = tmp_path / "report.json"
        options = ["test", *arguments, "--json", str(file)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        code, output = run_command(options, tmp_path, environment, 290)
        assert code == 0, output
        found = json.loads(file.read_text())
        assert f"level reached: {found['level']}" in output
        return found, output

    return run


@pytest.fixture(scope="module")
def process(request: pytest.FixtureRequest) -> Iterator[ProcessPoolExecutor]:
    """A process that finds what is in the folder ``BROKEN`` of the test's module."""
    folder = str(request.module.BROKEN)
    with ProcessPoolExecutor(1, get_context("spawn"), site.addsitedir, (folder,)) as executor:
        yield executor


@pytest.fixture
def suite(process: ProcessPoolExecutor, tmp_path: Path) -> Suite:
    """Runs cases by an expression of pytest's: the exit code, and all cases of the report."""

    def run(plugin: str, expression: str, *params: str) -> tuple[int, list[dict]]:
        report = tmp_path / "report.json"
        options = [f"--core-plugin={plugin}", f"--core-plugin-report={report}", "-k", expression]
        options += [f"--core-plugin-params={param}" for param in params]
        code = process.submit(testing.run, options).result(timeout=120)
        return code, json.loads(report.read_text())["cases"]

    return run

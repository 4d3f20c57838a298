"""What README.md and docs/ say is so: snippets run, files and commands and packages exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer.main
from forked_command import run_command
from ruamel.yaml import YAML

import core_plugin.cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
PACKAGE_PAGES = [p for f in ("core", "plugins/*", "contrib/*") for p in ROOT.glob(f"{f}/README.md")]
NOXFILE = (ROOT / "noxfile.py").read_text(encoding="utf-8")
TASKS = set(re.findall(r"^@nox\.[^\n]+\ndef (\w+)", NOXFILE, re.MULTILINE))
COMMANDS = set(typer.main.get_command(core_plugin.cli.app).commands)  # type: ignore[attr-defined]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def table(title: str) -> list[list[str]]:
    """The rows of the first table in a section of the README."""
    section = README.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in rows[2:]]


def core_plugin_command(folder: Path, *arguments: str, path: str = "") -> str:
    """What the command prints; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    code, output = run_command(arguments, folder, environment)
    assert code == 0, output
    return output


SNIPPETS = [
    pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")
    for page in (*PAGES, *PACKAGE_PAGES)
    for number, text in enumerate(blocks(page.read_text(encoding="utf-8"), "yaml"))
    if "radam" not in text
]


@pytest.mark.parametrize("text", SNIPPETS)
def test_yaml_is_valid(text: str, tmp_path: Path) -> None:
    """A part of a run is made whole by the one key that has no default."""
    if "train" not in YAML(typ="safe", pure=True).load(text):
        text += "\ntrain: {steps: 1}\n"
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    core_plugin_command(tmp_path, "validate", "run.yaml")


@pytest.mark.parametrize("example", sorted(ROOT.glob("examples/*.yaml")), ids=lambda p: p.name)
def test_example_is_valid(example: Path, tmp_path: Path) -> None:
    core_plugin_command(tmp_path, "validate", str(example))


def test_quickstart_runs_its_first_steps(tmp_path: Path) -> None:
    example = str(ROOT / "examples/quickstart.yaml")
    smaller = ("model.hidden_size=32", "train.steps=2", "scheduler.warmup_steps=1")
    output = core_plugin_command(tmp_path, "train", example, *smaller, "hooks.3.tokens=4")
    assert "sample at step 2" in output
    left = {path.name for path in (tmp_path / "runs/quickstart").glob("[!.]*")}
    assert left == {"checkpoints", "config.yaml", "metrics.jsonl", "plot.png", "samples.jsonl"}


def test_first_plugin_trains(tmp_path: Path) -> None:
    """The README's package is built, installed, and chosen as the README says."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    (source / "pyproject.toml").write_text(blocks(README, "toml")[0])
    (source / "acme_optimizers.py").write_text(blocks(README, "python")[0])
    flags = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, str(source)], check=True)
    chosen = next(text for text in blocks(README, "yaml") if "radam" in text)
    model = "model: {name: decoder, hidden_size: 16, layers: 1, heads: 1}"
    data = f"data: {{name: text, path: {tmp_path / 'text.txt'}, vocabulary_size: 300}}"
    (tmp_path / "text.txt").write_text("It is what it says. " * 200)
    (tmp_path / "run.yaml").write_text(f"{chosen}\n{model}\n{data}\ntrain: {{steps: 2}}\n")
    output = core_plugin_command(tmp_path, "train", "run.yaml", "device=cpu", path=str(site))
    assert "step 2/2" in output


def test_packages_are_those_of_the_tree(packages: list[Path]) -> None:
    projects = [
        tomllib.loads((p / "pyproject.toml").read_text())["project"]["name"] for p in packages
    ]
    folders = [str(p.relative_to(ROOT)) for p in packages]
    assert [row[:2] for row in table("Packages")] == [
        list(z) for z in zip(projects, folders, strict=True)
    ]


def test_commands_are_those_of_the_command_line() -> None:
    assert {row[0] for row in table("Commands")} == {f"core-plugin {name}" for name in COMMANDS}


def test_tasks_are_those_of_the_noxfile() -> None:
    assert {row[0] for row in table("Work on it")} == {f"nox -s {name}" for name in TASKS}


@pytest.mark.parametrize("page", [*PAGES, *PACKAGE_PAGES], ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"(?:^|`|\$ )core-plugin ([a-z]+)", text, re.MULTILINE)) <= COMMANDS
    assert set(re.findall(r"nox -s (\w+)", text)) <= TASKS
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert not [link for link in links if not (page.parent / link).exists()]


def test_floors_are_those_that_are_checked() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", page.split("## Floors")[1].split("\n## ")[0], re.MULTILINE)
    built = [[m for m in re.split(r"\W+", layer) if m and exists(m)] for layer in layers]
    assert [re.findall(r"\w+", row) for row in rows] == built


def exists(module: str) -> bool:
    """Whether core has a module, or a package with something in it."""
    path = ROOT / "core/src/core_plugin" / module
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_ci_runs_the_command_of_the_readme() -> None:
    first, second = (b.strip() for b in blocks(README, "sh")[:2])
    assert first == f"{second} -s quickstart"
    assert second in (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()


USE_OF_GATES = """
import torch
from torch import nn

from core_plugin.adapters import inject, merge
from core_plugin.types import PeftPlugin
from acme_gates import Gates

PeftPlugin("gates").register()(Gates)
model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4, bias=False))
inject(model, Gates, Gates.Params(target_modules=["0"]))
torch.nn.init.normal_(model[0].gates_factor["default"])
x = torch.randn(5, 3)
expected = model(x)
merge(model)
torch.testing.assert_close(model(x), expected)
print([name for name, p in model.named_parameters() if p.requires_grad])
"""


def test_the_peft_method_of_the_docs_is_whole(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    section = page.split("## `core_plugin.peft`")[1].split("\n## ")[0]
    method, layer = blocks(section, "python")
    (tmp_path / "acme_gates.py").write_text(method)
    (tmp_path / "acme_gates_layers.py").write_text(layer)
    (tmp_path / "use.py").write_text(USE_OF_GATES)
    done = subprocess.run(
        [sys.executable, "use.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "['0.gates_factor.default']\n", done.stderr


def test_the_strategy_of_the_docs_trains_as_ddp(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    section = page.split("## `core_plugin.distributed`")[1].split("\n## ")[0]
    (tmp_path / "acme.py").write_text(blocks(section, "python")[0])
    metadata = tmp_path / "acme-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[core_plugin.distributed]\naveraging = acme:Averaging\n"
    )
    (tmp_path / "text.txt").write_text("It is what it says. " * 200)
    (tmp_path / "run.yaml").write_text(
        "model: {name: decoder, hidden_size: 16, layers: 1, heads: 1}\n"
        "data: {name: text, path: text.txt, vocabulary_size: 300}\n"
        "launcher: {name: torchrun, processes_per_host: 2}\n"
        "train: {steps: 2}\n"
    )

    def losses(strategy: str) -> list[float]:
        options = (f"distributed={strategy}", f"checkpoint.directory={strategy}", "device=cpu")
        core_plugin_command(tmp_path, "train", "run.yaml", *options, path=str(tmp_path))
        lines = (tmp_path / strategy / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    assert losses("averaging") == pytest.approx(losses("ddp"), rel=1e-6)


def test_the_files_that_the_docs_name_are_there() -> None:
    for page in PAGES:
        named = re.findall(r"`([\w./-]+/test_\w+\.py)`", page.read_text(encoding="utf-8"))
        assert [name for name in named if not (ROOT / name).is_file()] == []

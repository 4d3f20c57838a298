"""Somebody else's wheel, pip-installed next to ours, is chosen by YAML alone.

``tidewater`` (its source is beside this file) brings a distributed strategy, an optimizer, a PEFT
method and a hook. Nothing of it is named anywhere else in the repository.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("third-party wheel")
"""One process runs all of them, since they share an environment."""

SOURCE = Path(__file__).parent / "tidewater"
NAMES = ("tidewater", "breakwater", "sextant", "keelson", "logbook")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "core_plugin")
LAUNCHER = ("launcher.name=torchrun", "launcher.processes_per_host=2")
RUN = """
model:       {name: decoder, hidden_size: 32, layers: 2, heads: 2}
data:        {name: text, path: corpus.txt, sequence_length: 32, vocabulary_size: 300}
peft:        {name: keelson, target_modules: .*(proj|lm_head), noise: 0.1}
optimizer:   {name: sextant, lr: 0.3}
distributed: breakwater
device:      {name: cpu, threads: 1}
hooks:       [logbook]
train:       {steps: 6, global_batch_size: 8, micro_batch_size: 2}
"""


class Installed:
    """An environment with our wheels and theirs, and a folder to run in."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python = python
        self.folder = folder

    def run(self, *arguments: str) -> str:
        """What ``python -m ...`` prints on standard output; it must succeed."""
        done = subprocess.run(
            [str(self.python), "-m", *arguments],
            cwd=self.folder,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def book(self, directory: str, rank: int) -> list[dict[str, Any]]:
        """What the hook wrote on a rank."""
        text = (self.folder / directory / f"logbook-{rank}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def losses(self, directory: str) -> dict[int, str]:
        """The losses by step, to the last bit; they are the same on both ranks."""
        books = [self.book(directory, rank) for rank in (0, 1)]
        first, second = ({e["step"]: e["loss"] for e in b if "step" in e} for b in books)
        assert first == second
        return first


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, packages: list[Path]) -> Installed:
    folder = tmp_path_factory.mktemp("third-party")
    python = new_environment(folder / "environment")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    sources = [str(p) for p in (SOURCE, *packages)]
    wheels = folder / "wheels"
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels)]
    subprocess.run([*pip, *build, *sources], check=True)
    files = [str(w) for w in wheels.iterdir()]
    assert len(files) == len(sources)
    install = ["--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, *install, *files], check=True)
    sentences = (
        f"The {n}th sentence is about {n * n}, and not about {n + 1}.\n" for n in range(400)
    )
    (folder / "corpus.txt").write_text("".join(sentences))
    (folder / "run.yaml").write_text(RUN)
    return Installed(python, folder)


def new_environment(folder: Path) -> Path:
    """A virtual environment with this one's packages, ours excepted."""
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    command = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", command], capture_output=True, text=True, check=True)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "core_plugin" not in entry.name:
            Path(site.stdout.strip(), entry.name).symlink_to(entry)
    return python


def test_is_named_nowhere_else(root: Path, packages: list[Path]) -> None:
    folders = [*packages, root / "examples", root / "docs", root / "benchmarks"]
    texts = [p for f in folders for e in ("py", "toml", "md", "yaml") for p in f.rglob(f"*.{e}")]
    assert len(texts) > 50
    for text in texts:
        content = text.read_text(encoding="utf-8").lower()
        assert not [name for name in NAMES if name in content], text


def test_is_listed_with_its_origin(installed: Installed) -> None:
    rows = json.loads(installed.run("core_plugin", "list", "--json"))
    found = {(r["type"], r["name"]): r for r in rows if r["distribution"] == "tidewater"}
    assert found.keys() == {
        ("distributed", "breakwater"),
        ("optimizer", "sextant"),
        ("peft", "keelson"),
        ("hook", "logbook"),
    }
    for row in found.values():
        assert (row["version"], row["state"]) == ("3.1", "usable")
        assert row["location"].startswith(str(installed.folder))
    assert {"fsdp2", "lora", "muon"} <= {r["name"] for r in rows}


@pytest.fixture(scope="module")
def whole(installed: Installed) -> str:
    """A run under torchrun that nothing interrupts."""
    installed.run(*TORCHRUN, "train", "run.yaml", "checkpoint.directory=whole")
    return "whole"


def test_trains_under_torchrun(installed: Installed, whole: str) -> None:
    losses = [float.fromhex(loss) for loss in installed.losses(whole).values()]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.1


def test_every_part_was_called_on_every_rank(installed: Installed, whole: str) -> None:
    for rank in (0, 1):
        calls = installed.book(whole, rank)[-1]["calls"]
        layers = 2 * 7 + 1  # of each block, four projections of attention and three more; the head
        assert calls == {
            "shard_model": 1,
            "add_adapter": layers,
            "gradient_sync False": 6,
            "gradient_sync True": 6,
            "all_reduce": 6 * layers,
            "step": 6,
        }


def test_checkpoint_tells_whose_plugins_wrote_it(installed: Installed, whole: str) -> None:
    checkpoint = installed.folder / whole / "checkpoints" / "step-00000006"
    plugins = json.loads((checkpoint / "run.json").read_text())["plugins"]
    theirs = {p["slot"]: p["name"] for p in plugins if p["distribution"] == "tidewater"}
    assert theirs == {
        "peft": "keelson",
        "optimizer": "sextant",
        "distributed": "breakwater",
        "hooks": "logbook",
    }
    adapter = json.loads((checkpoint / "adapter" / "adapter_config.json").read_text())
    assert (adapter["peft_type"], adapter["noise"]) == ("KEELSON", 0.1)


@pytest.mark.parametrize(("first", "second"), [("torchrun", "launcher"), ("launcher", "torchrun")])
def test_resumes_bit_for_bit(installed: Installed, whole: str, first: str, second: str) -> None:
    directory = f"{first}-then-{second}"

    def train(by: str, *arguments: str) -> None:
        start, more = (TORCHRUN, ()) if by == "torchrun" else (("core_plugin",), LAUNCHER)
        place = f"checkpoint.directory={directory}"
        installed.run(*start, "train", "run.yaml", place, *more, *arguments)

    train(first, "train.steps=3")
    assert list(installed.losses(directory)) == [1, 2, 3]
    train(second, "--resume")
    assert installed.book(directory, 0)[-1]["first_step"] == 3
    assert installed.losses(directory) == installed.losses(whole)


def test_gradients_are_those_of_one_process(installed: Installed) -> None:
    """Theirs are summed where torch's own strategies average; the loop asks which."""
    change = ("peft.noise=0", "optimizer={name: adamw, lr: 0.01}", "hooks=[jsonl]")
    many = ("checkpoint.directory=many", *LAUNCHER)
    one = ("checkpoint.directory=one", "distributed=none")
    for run in (many, one):
        installed.run("core_plugin", "train", "run.yaml", *change, *run)
    files = [installed.folder / d / "metrics.jsonl" for d in ("many", "one")]
    found = [[json.loads(line) for line in f.read_text().splitlines()] for f in files]
    for key in ("loss", "grad_norm"):
        several, single = ([m[key] for m in metrics] for metrics in found)
        assert several == pytest.approx(single, rel=1e-4)

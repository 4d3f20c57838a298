"""What the tests that cross packages share.

Runs as a user starts them: the command, real processes, and plugins of a third party.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

sys.path.append(str(Path(__file__).parents[1] / "core" / "tests"))
from forked_command import Command, run_command

RECORDER = Path(__file__).parent / "training" / "recorder"


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def packages(root: Path) -> list[Path]:
    """The folders of all packages of the repository."""
    folders = ("core", "plugins/*", "contrib/*")
    return [f.parent for g in folders for f in sorted(root.glob(f"{g}/pyproject.toml"))]


class Workspace:
    """A directory to run in, where the ``recorder`` distribution is installed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(RECORDER),
            "RECORDER_DIRECTORY": str(path),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "default",
        }
        self._started: list[Command] = []

    def small(self, **changes: Any) -> dict[str, Any]:
        """A run of a few quick steps on real text."""
        return {
            "model": {"name": "decoder", "hidden_size": 16, "layers": 2, "heads": 2},
            "data": {"name": "text", "path": "corpus.txt", "sequence_length": 16}
            | {"vocabulary_size": 300},
            "optimizer": {"name": "adamw", "lr": 1e-2},
            "scheduler": {"name": "cosine", "warmup_steps": 1},
            "device": {"name": "cpu", "threads": 1},
            "hooks": ["jsonl"],
            "train": {"steps": 4, "global_batch_size": 4, "micro_batch_size": 2},
        } | changes

    def resolve(self, document: Mapping[str, Any]) -> Any:
        """The checked configuration, in this process."""
        from core_plugin import config

        return config.resolve(document)

    @staticmethod
    def sample_indices(samples: int, settings: Mapping[str, Any]) -> Iterator[list[int]]:
        """Which samples each step reads, from the rule: a seeded permutation of each epoch."""
        from core_plugin.training.batches import Batches

        size = settings["global_batch_size"]
        order = Batches(None, range(samples), settings.get("seed", 0), size, 1, 0, 1)
        for step in range(settings["steps"]):
            yield [order.sample_index(step * size + i) for i in range(size)]

    def write(self, document: Mapping[str, Any], ranks: int, directory: str) -> Path:
        launcher = {"name": "torchrun", "processes_per_host": ranks} if ranks > 1 else "local"
        checkpoint = {"directory": directory} | document.get("checkpoint", {})
        file = self.path / f"{directory}.yaml"
        file.write_text(json.dumps({"launcher": launcher} | document | {"checkpoint": checkpoint}))
        return file

    def start(
        self, command: Sequence[str], directory: Path | None = None, **environment: str
    ) -> Command:
        output = self.path / f"output-{len(self._started)}"
        environment = self.environment | environment
        self._started.append(Command(command, directory or self.path, environment, output))
        return self._started[-1]

    def end(self) -> None:
        """End what is left of all that was started."""
        for command in self._started:
            command.kill()

    def run(self, command: Sequence[str]) -> tuple[int, str]:
        """The exit code and all that was printed."""
        return run_command(command, self.path, self.environment)

    def train(
        self, document: Mapping[str, Any], ranks: int = 1, *options: str, directory: str = "run"
    ) -> list[dict[str, float]]:
        """The metrics of all steps of a run that must succeed."""
        code, output = self.run(["train", str(self.write(document, ranks, directory)), *options])
        assert code == 0, output
        return self.metrics(directory)

    def metrics(self, directory: str = "run") -> list[dict[str, float]]:
        file = self.path / directory / "metrics.jsonl"
        if not file.exists():
            return []
        return [json.loads(line) for line in file.read_text().splitlines()]

    def checkpoints(self, directory: str = "run") -> list[Path]:
        return sorted((self.path / directory / "checkpoints").glob("step-*"))

    def saved_tensors(self, directory: str = "run") -> dict[str, torch.Tensor]:
        """Every tensor of the newest checkpoint, whole, read without core-plugin."""
        import torch
        import torch.distributed.checkpoint as dcp

        path = self.checkpoints(directory)[-1] / "state"
        metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        tensors = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in metadata.items()}
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            dcp.load(tensors, checkpoint_id=path, no_dist=True)
        return tensors

    def calls(self) -> set[str]:
        """What the recorder's plugins wrote down."""
        return {
            line for file in self.path.glob("calls-*") for line in file.read_text().splitlines()
        }


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    from core_plugin import discovery

    words = (Path(__file__).read_text() * 2).split()
    (tmp_path / "corpus.txt").write_text(" ".join(words))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(RECORDER))
    monkeypatch.setenv("RECORDER_DIRECTORY", str(tmp_path))
    discovery.forget()
    workspace = Workspace(tmp_path)
    yield workspace
    workspace.end()
    discovery.forget()

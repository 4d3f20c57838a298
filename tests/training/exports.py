"""What the tests of exports share: runs, the real command, and reading without core-plugin."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from forked_command import run_command

TOKENS = torch.arange(32).reshape(2, 16) * 7 % 300
MODEL = {"name": "decoder", "hidden_size": 16, "layers": 2, "heads": 2}


def command(path: Path, *arguments: object, file_limit: int = -1) -> tuple[int, str]:
    """The exit code of the real command, and all that it printed.

    Args:
        path: Where it runs.
        arguments: The command's.
        file_limit: The bytes that a file can have before writing fails as on a full disk.
    """
    done = subprocess.run(
        [sys.executable, "-m", "core_plugin", *map(str, arguments)],
        cwd=path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERMINAL_WIDTH": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit)),
    )
    return done.returncode, done.stdout


def train(path: Path, name: str, ranks: int, **parts: object) -> Path:
    """The directory of a run of four steps, whose adapter changes the logits visibly."""
    text = {"name": "text", "path": "corpus.txt", "sequence_length": 16, "vocabulary_size": 300}
    parts = {"model": MODEL, "distributed": "none", **parts}
    job = {
        "data": text,
        "optimizer": {"name": "adamw", "lr": 0.1},
        "device": {"name": "cpu", "threads": 1},
        "hooks": [],
        "train": {"steps": 4, "global_batch_size": 4, "micro_batch_size": 2},
        "checkpoint": {"directory": name, "every": 2, "keep": 2},
        "launcher": {"name": "torchrun", "processes_per_host": ranks} if ranks > 1 else "local",
        **parts,
    }
    file = path / f"{name}.yaml"
    file.write_text(json.dumps(job))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code, output = run_command(["train", str(file)], path, environment)
    assert code == 0, output
    return path / name


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def saved_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The model's, whole, read without core-plugin."""
    reader = dcp.FileSystemReader(checkpoint / "state")
    metadata = reader.read_metadata().state_dict_metadata.items()
    tensors = {n: torch.empty(m.size) for n, m in metadata if n.startswith("model.")}
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def sign(checkpoint: Path) -> None:
    """Let the manifest of a checkpoint that a test has changed be right."""
    manifest = checkpoint / "manifest.json"
    manifest.unlink(missing_ok=True)
    files = {}
    for file in (f for f in checkpoint.rglob("*") if f.is_file()):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        files[str(file.relative_to(checkpoint))] = {"size": file.stat().st_size, "sha256": digest}
    manifest.write_text(json.dumps({"format": 1, "files": files}))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def logits(model: torch.nn.Module) -> torch.Tensor:
    """``model``'s, whether it is core-plugin's or of transformers."""
    with torch.no_grad():
        output = model.eval()(TOKENS)
    return getattr(output, "logits", output)

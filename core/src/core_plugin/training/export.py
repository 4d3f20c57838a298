"""From a checkpoint to files that other programs read: the whole model, or the adapter alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import tokenizers
from safetensors import SafetensorError
from torch import Tensor, nn

from core_plugin import config, state
from core_plugin.adapters.merge import merge as merge_adapters
from core_plugin.adapters.merge import unload
from core_plugin.config import RunConfig
from core_plugin.errors import CheckpointError, ConfigError
from core_plugin.tensors import model_tensors
from core_plugin.training import assembly
from core_plugin.training.checkpoint import Checkpoints, verify
from core_plugin.training.resume import RUN_FILE
from core_plugin.training.world import World, join

MODEL_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "run.yaml"


def export(source: Path, directory: Path, *, merge: bool) -> Path:
    """Write a checkpoint's model, or its adapter, beside the tokenizer and the configuration.

    The model is ``model.safetensors``: its parameters and persistent buffers by the architecture's
    names, as ``model.weights`` reads them. An adapter is the peft library's files. The directory is
    complete or not there.

    Args:
        source: A checkpoint, or the directory of a run, which stands for its newest one.
        directory: Where to: empty, or not there yet.
        merge: Write the model with the run's adapter in it, and not the adapter alone.

    Returns:
        The checkpoint.

    Raises:
        ConfigError: With what is wrong with one of them, or why the adapter cannot be merged.
    """
    with join(None) as world:
        checkpoint = _find(source, world)
        _check_target(directory, checkpoint)
        saved = json.loads((checkpoint / RUN_FILE).read_text(encoding="utf-8"))
        document, has_adapter = saved["config"], saved["config"]["peft"] is not None
        if merge and not has_adapter:
            raise ConfigError(f"{checkpoint} has no adapter to merge; leave --merge out")
        tensors = None
        if merge or not has_adapter:
            tensors, document = _whole_model(checkpoint, document, world)
    with _complete_or_absent(directory) as aside:
        if tensors is None:
            shutil.copytree(checkpoint / "adapter", aside, dirs_exist_ok=True)
        else:
            safetensors.torch.save_file(tensors, aside / MODEL_FILE, {"format": "pt"})
        shutil.copyfile(checkpoint / TOKENIZER_FILE, aside / TOKENIZER_FILE)
        config.dump(document, aside / CONFIG_FILE)
    return checkpoint


def _find(source: Path, world: World) -> Path:
    """The checkpoint that is meant; its files are as they were written."""
    checkpoint = source
    if (within := source / "checkpoints").is_dir():
        steps = Checkpoints(within, world, keep=1).steps()
        if not steps:
            raise ConfigError(f"the run in {source} has no checkpoint yet")
        checkpoint = steps[max(steps)]
    elif not (source / RUN_FILE).is_file():
        raise ConfigError(f"{source} is neither a checkpoint nor the directory of a run")
    if faults := verify(checkpoint):
        raise ConfigError(f"the checkpoint {checkpoint} is broken:\n  " + "\n  ".join(faults))
    return checkpoint


def _check_target(directory: Path, checkpoint: Path) -> None:
    if checkpoint.resolve() in directory.resolve().parents:
        raise ConfigError(f"{directory} is inside the checkpoint, which is not to be changed")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is there already; choose an empty directory, or a new one")


@contextlib.contextmanager
def _complete_or_absent(directory: Path) -> Iterator[Path]:
    """A block that fills a directory beside the one that is asked for, whose name it then gets."""
    final = directory.resolve()
    aside = final.with_name(f".partial-{final.name}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        for file in aside.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        aside.rename(final)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{directory} cannot be written: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _whole_model(
    checkpoint: Path, document: Mapping[str, Any], world: World
) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """The model's tensors by name, its adapter merged, and the configuration that fits them."""
    run = _run_here(document)
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / TOKENIZER_FILE))
    model = _model(run, checkpoint, tokenizer.get_vocab_size(), world)
    if run.get("peft") is not None:
        untied = merge_adapters(model, safe=True, keep=False)
        model = unload(model)
        if untied:
            run = _untied(run, untied)
            document = {**document, "model": run.resolved()["model"]}
    whole = {name: tensor.detach().contiguous() for name, tensor in model_tensors(model).items()}
    return whole, document


def _run_here(document: Mapping[str, Any]) -> RunConfig:
    """A run's configuration, in one process on the CPU."""
    elsewhere = ("distributed", "launcher")
    here = {key: value for key, value in document.items() if key not in elsewhere}
    if here["peft"] is not None and "weights" in here["peft"]:
        here["peft"] = {**here["peft"], "weights": None}  # the checkpoint has those to start from
    return config.resolve({**here, "device": "cpu", "hooks": []})


def _model(run: RunConfig, checkpoint: Path, vocabulary_size: int, world: World) -> nn.Module:
    """The model with the tensors that the checkpoint has."""
    device = assembly.select_device(run, world)
    model = assembly.shard_model(run, assembly.build_model(run, vocabulary_size), device, world)
    try:
        state.load_model(model, checkpoint / "state", include_frozen=run.get("peft") is None)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    return model


def _untied(run: RunConfig, names: list[str]) -> RunConfig:
    """The configuration of a model in which tensors are shared no more."""
    chosen = run["model"]
    params = chosen.implementation.untied(chosen.params)
    if params is None:
        raise ConfigError(
            f"merging gives {', '.join(names)} other values than the modules have that share it, "
            f"and the architecture {chosen.route.name!r} cannot have them apart; leave the module "
            "out of peft.target_modules"
        )
    model = (dataclasses.replace(chosen, params=params),)
    return dataclasses.replace(run, selections={**run.selections, "model": model})

"""From a checkpoint to files that other programs read: the whole model, or the adapter alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
from safetensors import SafetensorError
from torch import Tensor

from core_plugin import config, state
from core_plugin.adapters.bases import bases
from core_plugin.adapters.merge import merge as merge_adapters
from core_plugin.adapters.merge import unload
from core_plugin.config import RunConfig
from core_plugin.errors import CheckpointError, ConfigError
from core_plugin.tensors import model_tensors
from core_plugin.training import assembly, pretrained
from core_plugin.training.checkpoint import Checkpoints, sync, verify
from core_plugin.training.resume import RUN_FILE
from core_plugin.training.world import World, join

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "run.yaml"


class Exported(NamedTuple):
    """What was exported."""

    checkpoint: Path
    notes: list[str]
    """What the user should know of the files."""


class _Model(NamedTuple):
    """What is to be written of a model."""

    run: RunConfig
    """The configuration that fits it."""
    tensors: dict[str, Tensor]
    """As they are to be, by name; on ``meta``."""
    read: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    """Gives some of them with their values."""


def export(
    source: Path,
    directory: Path,
    *,
    merge: bool = False,
    shard_size: int = 5_000_000_000,
    dtype: torch.dtype | None = None,
) -> Exported:
    """Write a checkpoint's model, or its adapter, beside the tokenizer and the configuration.

    A model is what ``from_pretrained`` of transformers reads: its parameters and persistent
    buffers as safetensors by the architecture's names, which ``model.weights`` reads too, and
    ``config.json`` if transformers has such an architecture. It is read and written file by file,
    and no more than one file's tensors are in memory. An adapter is the peft library's files. The
    directory is complete or not there.

    Args:
        source: A checkpoint, or the directory of a run, which stands for its newest one.
        directory: Where to: empty, or not there yet.
        merge: Write the model with the run's adapter in it, and not the adapter alone. The whole
            model is then in memory, once.
        shard_size: The bytes of tensors that a file holds, at most; a larger tensor has a file of
            its own.
        dtype: What a model's floating-point tensors are rounded to; None: nothing is.

    Raises:
        ConfigError: With what is wrong with one of them, or why the adapter cannot be merged.
    """
    with join(None) as world:
        checkpoint = _find(source, world)
        _check_target(directory, checkpoint)
        document = json.loads((checkpoint / RUN_FILE).read_text(encoding="utf-8"))["config"]
        run = _run_here(document)
        _check_choice(run, checkpoint, merge, dtype)
        tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / TOKENIZER_FILE))
        special = pretrained.special_tokens(tokenizer, _end_token(run))
        model, notes = None, []
        if merge or run.get("peft") is None:
            prepare = _merged_model if merge else _saved_model
            model = prepare(run, checkpoint, tokenizer.get_vocab_size(), dtype, world)
            document = {**document, "model": model.run.resolved()["model"]}
    with _complete_or_absent(directory) as aside:
        if model is None:
            shutil.copytree(checkpoint / "adapter", aside, dirs_exist_ok=True)
        else:
            notes = _write_model(aside, model, shard_size, tokenizer.get_vocab_size(), special)
        shutil.copyfile(checkpoint / TOKENIZER_FILE, aside / TOKENIZER_FILE)
        pretrained.write_tokenizer_config(aside, tokenizer, special)
        config.dump(document, aside / CONFIG_FILE)
        for file in aside.rglob("*.safetensors"):  # whose library lets nobody else read them
            shutil.copymode(aside / CONFIG_FILE, file)
    return Exported(checkpoint, notes)


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
        for path in (*aside.rglob("*"), aside):
            sync(path)
        aside.rename(final)
        sync(final.parent)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{directory} cannot be written: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _check_choice(run: RunConfig, checkpoint: Path, merge: bool, dtype: torch.dtype | None) -> None:
    has_adapter = run.get("peft") is not None
    if merge and not has_adapter:
        raise ConfigError(f"{checkpoint} has no adapter to merge; leave --merge out")
    if dtype is not None and has_adapter and not merge:
        raise ConfigError(
            f"{checkpoint} has an adapter, which is written as it was trained; leave --dtype out, "
            "or write the whole model with --merge"
        )


def _run_here(document: Mapping[str, Any]) -> RunConfig:
    """A run's configuration, in one process on the CPU."""
    elsewhere = ("distributed", "launcher")
    here = {key: value for key, value in document.items() if key not in elsewhere}
    if here["peft"] is not None and "weights" in here["peft"]:
        here["peft"] = {**here["peft"], "weights": None}  # the checkpoint has those to start from
    return config.resolve({**here, "device": "cpu", "hooks": []})


def _end_token(run: RunConfig) -> str | None:
    data = run["data"]
    return data.implementation.end_token(data.params)  # type: ignore[no-any-return]


def _saved_model(
    run: RunConfig, checkpoint: Path, vocabulary_size: int, dtype: torch.dtype | None, _: World
) -> _Model:
    """The model that a checkpoint has: what is written is read from there when it is due."""
    directory = checkpoint / "state"
    described = assembly.build_model(run, vocabulary_size)
    with _faults_of_configuration():
        saved = state.saved_tensors(described, directory, include_frozen=True)

    def read(wanted: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = {name: torch.empty_like(t, device="cpu") for name, t in wanted.items()}
        state.read_tensors(tensors, directory)
        return tensors

    return _Model(run, _described(saved, dtype), read)


def _merged_model(
    run: RunConfig, checkpoint: Path, vocabulary_size: int, dtype: torch.dtype | None, world: World
) -> _Model:
    """The model with its adapter merged, in memory."""
    device = assembly.select_device(run, world)
    model = assembly.shard_model(run, assembly.build_model(run, vocabulary_size), device, world)
    with _faults_of_configuration():
        state.load_model(model, checkpoint / "state", include_frozen=False)
    changed = [slot for base in bases(model) for slot in base.slots.values()]
    untied = merge_adapters(model, keep=False)  # in place
    if faults := [slot.path for slot in changed if not slot.tensor.isfinite().all()]:
        raise ConfigError(*(f"merging makes {name} infinite or not a number" for name in faults))
    merged = model_tensors(unload(model))

    def read(wanted: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: merged[name].detach().to(t.dtype).contiguous() for name, t in wanted.items()}

    return _Model(_untied(run, untied) if untied else run, _described(merged, dtype), read)


def _described(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors as they are to be, on ``meta``."""
    return {
        name: tensor.detach().to("meta", dtype if tensor.is_floating_point() else None)
        for name, tensor in tensors.items()
    }


@contextlib.contextmanager
def _faults_of_configuration() -> Iterator[None]:
    """A block in which a checkpoint that does not fit is the user's mistake."""
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def _write_model(
    directory: Path, model: _Model, shard_size: int, vocabulary_size: int, special: dict[str, int]
) -> list[str]:
    """Write a model's files; what the user should know of them."""
    pretrained.write_tensors(directory, model.tensors, model.read, shard_size)
    chosen = model.run["model"]
    architecture = chosen.implementation.transformers_config(chosen.params, vocabulary_size)
    if architecture is None:
        return [
            f"there is no config.json: the architecture {chosen.route.name!r} names none of "
            "transformers, which cannot load the model by itself"
        ]
    pretrained.write_config(directory, architecture, model.tensors, special)
    return []


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

"""An adapter's files, in the format of the peft library.

``adapter_model.safetensors`` holds the adapter's tensors, ``adapter_config.json`` what it takes
to use them. Two saves of the same adapter are the same bytes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core_plugin.adapters.matching import ALL_LINEAR
from core_plugin.adapters.names import FILE_PREFIX, adapter_state, split_name
from core_plugin.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from core_plugin.types.peft import BasePeft

TENSORS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def save_adapter(
    directory: Path | str,
    method: type[BasePeft],
    params: Any,
    state_dict: Mapping[str, Tensor],
    adapter_name: str,
    base_model: str | None,
) -> None:
    """Write an adapter's files, which ``peft.PeftModel.from_pretrained`` can read.

    Args:
        directory: Where to; it is made if need be.
        method: The PEFT method.
        params: The method's parameters that the adapter was made with.
        state_dict: Whole tensors by in-memory name; what is not the adapter's is left out.
        adapter_name: Which adapter; files do not hold its name.
        base_model: A path or name of the base model, for readers of the file.

    Raises:
        CheckpointError: The tensors hold none of the adapter's.
    """
    import safetensors.torch

    tensors = adapter_state(state_dict, adapter_name, method.prefix)
    if not tensors:
        raise CheckpointError(
            f"there is nothing to write into {directory}: no tensor of an adapter called "
            f"{adapter_name!r} with the prefix {method.prefix!r} was given"
        )
    splits = (split_name(name, adapter_name, method.prefix) for name in state_dict)
    paths = sorted({".".join(split[0]) for split in splits if split})
    config = {
        **method.config(params),
        "base_model_name_or_path": base_model,
        "exclude_modules": _sorted(params.exclude_modules),
        "inference_mode": True,
        "target_modules": _targets(params.target_modules, paths),
        "task_type": None,
    }
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / TENSORS, safetensors.torch.save(contiguous, {"format": "pt"}))
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    _write(directory / CONFIG, text.encode())


def load_adapter(
    model: nn.Module,
    directory: Path | str,
    method: type[BasePeft],
    params: Any,
    adapter_name: str,
) -> None:
    """Read an adapter's files into a model that has such an adapter, sharded or not.

    Args:
        model: A model with an adapter of the method, made with ``params``, and real tensors.
        directory: Where the files are: core-plugin's or the peft library's.
        method: The PEFT method.
        params: The method's parameters.
        adapter_name: Which adapter of the model.

    Raises:
        CheckpointError: With everything that is missing, unexpected, of another shape, or made
            with other settings; nothing was changed.
    """
    from core_plugin.state import copy_full

    directory = Path(directory)
    tensors, config = _read(directory)
    wanted = _adapter_parameters(model, method, adapter_name)
    if not wanted:
        raise CheckpointError(f"the model has no adapter {adapter_name!r} to load {directory} into")
    faults = [*_config_faults(config, method, params), *_tensor_faults(tensors, wanted)]
    if faults:
        report = "".join(f"\n  - {fault}" for fault in faults)
        raise CheckpointError(f"{directory} is not for this model's {adapter_name!r}:{report}")
    for name, parameter in wanted.items():
        copy_full(parameter, tensors[name])


def _targets(wanted: str | list[str], paths: list[str]) -> str | list[str]:
    """What to tell readers: the peft library takes ``all-linear`` for other layers than we do."""
    if isinstance(wanted, str):
        return paths if wanted.lower() == ALL_LINEAR else wanted
    return sorted(set(wanted))


def _sorted(wanted: str | list[str] | None) -> str | list[str] | None:
    return wanted if wanted is None or isinstance(wanted, str) else sorted(set(wanted))


def _write(path: Path, content: bytes) -> None:
    aside = path.with_name(f"{path.name}.tmp")
    aside.write_bytes(content)
    os.replace(aside, path)


def _read(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors by name, without the prefix that bare injection leaves out; the settings."""
    import safetensors
    import safetensors.torch

    try:
        config = json.loads((directory / CONFIG).read_text())
        tensors = safetensors.torch.load_file(directory / TENSORS)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{directory} does not hold an adapter ({CONFIG} and {TENSORS}): {error}"
        ) from error
    return {name.removeprefix(FILE_PREFIX): tensor for name, tensor in tensors.items()}, config


def _adapter_parameters(
    model: nn.Module, method: type[BasePeft], adapter_name: str
) -> dict[str, nn.Parameter]:
    """An adapter's parameters by their names in a file, without the prefix."""
    from core_plugin.adapters.layer import AdapterLayer

    parameters = {}
    for path, module in model.named_modules():
        if isinstance(module, AdapterLayer) and module.method is method:
            for name, parameter in module.adapter_parameters(adapter_name):
                holder, _, rest = name.partition(f".{adapter_name}")
                parameters[f"{path}.{holder}{rest}"] = parameter
    return parameters


def _config_faults(config: Mapping[str, Any], method: type[BasePeft], params: Any) -> Iterator[str]:
    for key, ours in sorted(method.config(params).items()):
        if key in config and key not in method.training_only and config[key] != ours:
            yield f"{key}: {config[key]!r} in {CONFIG}, {ours!r} in the model"


def _tensor_faults(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, nn.Parameter]
) -> Iterator[str]:
    for name, parameter in wanted.items():
        if name not in tensors:
            yield f"{name}: missing"
        elif tensors[name].shape != parameter.shape:
            shapes = f"{list(tensors[name].shape)} in the file, {list(parameter.shape)}"
            yield f"{name}: shape {shapes} in the model"
        elif parameter.is_meta:
            yield f"{name}: on the meta device in the model; give it memory first"
    yield from (f"{name}: unexpected" for name in tensors if name not in wanted)

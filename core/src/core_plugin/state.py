"""The tensors of a model and its optimizer, whatever their sharding: clip, save, load, gather.

It is right for every model whose sharded tensors are ``DTensor``s and whose other ones are equal
on all ranks. Names are the architecture's own (wrappers leave no trace in them), so what one
strategy saved on some ranks another one loads on others. The format is torch's distributed
checkpoint with the keys ``model.<name>`` and ``optimizer.<name>.<state key>``; what is no tensor is
in ``optimizer.json``.

This module imports torch, so the light ones import it where they use it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from core_plugin.errors import CheckpointError
from core_plugin.params import near
from core_plugin.tensors import gather, is_sharded, local, model_tensors, trained_parameters

OPTIMIZER_FILE = "optimizer.json"


def other_state(model: nn.Module) -> str | None:
    """The name of something in the model's state dict that is no tensor, if there is any."""
    entries = model.state_dict(keep_vars=True).items()
    return next((name for name, value in entries if not isinstance(value, Tensor)), None)


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """See :meth:`core_plugin.types.distributed.BaseDistributed.clip_grad_norm`.

    Gradients on different meshes, and plain ones, each give a norm; their norm is the whole.
    """
    groups: dict[Any, list[Tensor]] = {}
    for grad in (p.grad for p in parameters if p.grad is not None):
        groups.setdefault(grad.device_mesh if is_sharded(grad) else None, []).append(grad)
    if not groups:
        return torch.zeros(())
    norms = [gather(nn.utils.get_total_norm(grads)) for grads in groups.values()]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if max_norm is not None:
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for grads in groups.values():
            torch._foreach_mul_([local(g) for g in grads], scale)
    return total


# Optimizer

KERNEL_OPTIONS = frozenset({"capturable", "foreach", "fused"})
"""What says how torch's optimizers compute a step: the run's own, for the device that it is on."""


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state tensors by ``<parameter>.<state key>``.

    Raises:
        CheckpointError: The optimizer holds other tensors than the model trains, or sharded state
            whose layout no other number of ranks could read.
    """
    tensors = {}
    for name, parameter in _owned(model, optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                continue
            if is_sharded(parameter) and not is_sharded(value) and value.ndim:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {key} of {name} as a plain tensor of shape "
                    f"{tuple(value.shape)} although the parameter is sharded; it has to be a "
                    "DTensor laid out like the parameter"
                )
            tensors[f"{name}.{key}"] = value
    return tensors


def _owned(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The model's trained parameters, which must be the very ones that the optimizer holds."""
    trained = trained_parameters(model)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = {id(p): n for n, p in trained.items()}
    missing = [n for n, p in trained.items() if id(p) not in held]
    dead = len(held - set(names))
    if missing or dead:
        raise CheckpointError(
            f"{type(optimizer).__name__} does not hold the parameters that the model trains: "
            f"{len(missing)} are in none of its groups ({_listed(missing)}), and {dead} of those "
            "it holds are not trained"
        )
    return trained


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Check that the optimizer holds every trained parameter, in one group, and no other.

    Raises:
        CheckpointError: With the names; a step would leave them as they are.
    """
    _owned(model, optimizer)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if len(held) != len(set(held)):
        raise CheckpointError(f"{type(optimizer).__name__} holds a parameter in two groups")


def _plain_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer keeps that is no tensor, and which keys each parameter has."""
    owned = _owned(model, optimizer)
    names = {id(p): n for n, p in owned.items()}
    return {
        "state": {
            name: {
                "tensors": [k for k, v in state.items() if isinstance(v, Tensor)],
                "values": {k: v for k, v in state.items() if not isinstance(v, Tensor)},
            }
            for name, parameter in owned.items()
            if (state := optimizer.state.get(parameter))
        },
        "groups": [
            {
                "names": [names[id(p)] for p in group["params"]],
                "options": {k: _number(v) for k, v in group.items() if k != "params"},
            }
            for group in optimizer.param_groups
        ],
    }


def _as_json(plain: Mapping[str, Any], optimizer: Optimizer) -> str:
    try:
        return json.dumps(plain)
    except TypeError as error:
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps something that is neither a tensor nor plain data, "
            f"and that a checkpoint cannot hold: {error}"
        ) from None


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


# Checkpoints


def save(model: nn.Module, optimizer: Optimizer, directory: Path, *, include_frozen: bool) -> None:
    """See :meth:`core_plugin.types.distributed.BaseDistributed.save_checkpoint`.

    ``model`` is the unwrapped one.
    """
    write = stage(model, optimizer, include_frozen=include_frozen, copy=False)
    write(directory, None)


def stage(
    model: nn.Module, optimizer: Optimizer, *, include_frozen: bool, copy: bool = True
) -> Callable[[Path, dist.ProcessGroup | None], None]:
    """See :meth:`core_plugin.types.distributed.BaseDistributed.stage_checkpoint`.

    ``model`` is the unwrapped one. Without ``copy``, the tensors themselves are written.
    """
    tensors = _checkpoint_tensors(model, include_frozen)
    tensors |= {f"optimizer.{n}": t for n, t in optimizer_tensors(model, optimizer).items()}
    text = _as_json(_plain_state(model, optimizer), optimizer)
    tensors = _detached(tensors)
    if copy:  # of a sharded tensor, this rank's part, as one that is sharded alike
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}

    def write(directory: Path, group: dist.ProcessGroup | None) -> None:
        with _torch_errors(f"{directory} cannot be written"):
            dcp.save(
                dict(tensors),
                storage_writer=_writer(directory, are_copies=copy),
                process_group=group,
                no_dist=not dist.is_initialized(),
            )
        if _rank() == 0:
            (directory / OPTIMIZER_FILE).write_text(text, encoding="utf-8")

    return write


def _writer(directory: Path, *, are_copies: bool) -> dcp.FileSystemWriter:
    """A writer that copies to the host ahead of writing, where there is pinned memory for it."""
    if are_copies:
        return dcp.FileSystemWriter(directory, per_thread_copy_ahead=0)
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError:
        return dcp.FileSystemWriter(directory, per_thread_copy_ahead=0)
    return dcp.FileSystemWriter(directory)


def _checkpoint_tensors(model: nn.Module, include_frozen: bool) -> dict[str, Tensor]:
    return {
        f"model.{name}": tensor
        for name, tensor in model_tensors(model).items()
        if include_frozen or tensor.requires_grad or not isinstance(tensor, nn.Parameter)
    }


@contextmanager
def _torch_errors(what: str) -> Iterator[None]:
    """Raise what torch collected from all ranks, which is no ``Exception``, as our own error."""
    try:
        yield
    except CheckpointException as error:
        failures = [f"rank {r}: {e[0]!r}" for r, e in sorted(error.failures.items())]
        raise CheckpointError("\n  ".join([f"{what}:", *failures])) from error


def _detached(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def load(model: nn.Module, optimizer: Optimizer, directory: Path, *, include_frozen: bool) -> None:
    """See :meth:`core_plugin.types.distributed.BaseDistributed.load_checkpoint`.

    Everything is compared by name and shape first, so that a fault changes nothing.
    """
    plain = _plain_in(directory)
    tensors, state, faults = _matched(model, optimizer, directory, plain, include_frozen)
    if faults:
        raise CheckpointError(f"{directory} does not fit the run:\n  " + "\n  ".join(faults))
    with _torch_errors(f"{directory} cannot be read"):
        dcp.load(_detached(tensors), checkpoint_id=directory, no_dist=not dist.is_initialized())
    owned = _owned(model, optimizer)
    for name, entries in state.items():
        optimizer.state[owned[name]] = entries
    for group, saved in zip(optimizer.param_groups, plain["groups"], strict=True):
        for key, value in saved["options"].items():
            if key not in KERNEL_OPTIONS:
                _restore_option(group, key, value)


def misfits(
    model: nn.Module, optimizer: Optimizer, directory: Path, *, include_frozen: bool
) -> list[str]:
    """For what :func:`load` would refuse a checkpoint, by names and shapes; nothing is changed."""
    _, _, faults = _matched(model, optimizer, directory, _plain_in(directory), include_frozen)
    return faults


def _plain_in(directory: Path) -> dict[str, Any]:
    """What a checkpoint has of the optimizer that is no tensor."""
    return json.loads((directory / OPTIMIZER_FILE).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _matched(
    model: nn.Module,
    optimizer: Optimizer,
    directory: Path,
    plain: Mapping[str, Any],
    include_frozen: bool,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]], list[str]]:
    """What a checkpoint is read into: all tensors by name, the optimizer's; and what differs."""
    metadata = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    state = _state_like(model, optimizer, plain["state"], metadata)
    tensors = _checkpoint_tensors(model, include_frozen)
    for name, entries in state.items():
        for key in plain["state"][name]["tensors"]:
            tensors[f"optimizer.{name}.{key}"] = entries[key]
    faults = _differences(tensors, metadata) + _group_differences(model, optimizer, plain["groups"])
    return tensors, state, faults


def load_model(model: nn.Module, directory: Path, *, include_frozen: bool) -> None:
    """Read the model's tensors of a checkpoint, and nothing of the optimizer, in one process.

    The arguments are those of :func:`load`.

    Raises:
        CheckpointError: A tensor is missing, extra, or of another shape; nothing was changed.
    """
    held = model_tensors(model)
    saved = saved_tensors(model, directory, include_frozen=include_frozen)
    read_tensors({name: held[name] for name in saved}, directory)


def saved_tensors(model: nn.Module, directory: Path, *, include_frozen: bool) -> dict[str, Tensor]:
    """The model's tensors as a checkpoint has them, on ``meta``, by name, in the model's order.

    The arguments are those of :func:`load`; the model may be on ``meta``.

    Raises:
        CheckpointError: A tensor is missing, extra, or of another shape.
    """
    metadata = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    saved: dict[str, Any] = {n: m for n, m in metadata.items() if n.startswith("model.")}
    tensors = _checkpoint_tensors(model, include_frozen)
    if faults := _differences(tensors, saved):
        raise CheckpointError(f"{directory} does not fit the run:\n  " + "\n  ".join(faults))
    return {
        name.removeprefix("model."): tensor.new_empty(
            tensor.shape, dtype=saved[name].properties.dtype, device="meta"
        )
        for name, tensor in tensors.items()
    }


def read_tensors(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Read some of a model's tensors of a checkpoint, in one process.

    Args:
        tensors: What is read into, by name; another precision than the checkpoint's is rounded to.
        directory: The checkpoint's.

    Raises:
        CheckpointError: A file cannot be read.
    """
    named = {f"model.{name}": tensor.detach() for name, tensor in tensors.items()}
    with _torch_errors(f"{directory} cannot be read"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(named, checkpoint_id=directory, no_dist=True)


def _restore_option(group: dict[str, Any], key: str, value: Any) -> None:
    current = group.get(key)
    if isinstance(current, Tensor):
        current.fill_(value)
    else:
        group[key] = tuple(value) if isinstance(current, tuple) else value


def _state_like(
    model: nn.Module,
    optimizer: Optimizer,
    saved: Mapping[str, Mapping[str, Any]],
    metadata: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """Memory for the state that the checkpoint has, laid out like the parameters.

    It is made from what was saved, not from what the optimizer happens to hold before its first
    step, so that no optimizer can lose its state on the way.
    """
    owned = _owned(model, optimizer)
    options = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    state: dict[str, dict[str, Any]] = {}
    for name in saved.keys() & owned.keys():
        state[name] = dict(saved[name]["values"])
        group = options[id(owned[name])]
        for key in saved[name]["tensors"]:
            # As in torch's Optimizer.load_state_dict: a step counter is on the CPU unless the
            # kernel that reads it is on the device.
            on_cpu = key == "step" and not (group.get("fused") or group.get("capturable"))
            device = torch.device("cpu") if on_cpu else local(owned[name]).device
            stored = metadata.get(f"optimizer.{name}.{key}")
            state[name][key] = _like(owned[name], stored, device)
    return state


def _like(parameter: nn.Parameter, stored: Any, device: torch.device) -> Tensor:
    if not isinstance(stored, TensorStorageMetadata):
        return torch.empty(0)
    dtype = stored.properties.dtype
    if stored.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(stored.size, dtype=dtype, device=device)


def _differences(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> list[str]:
    faults = []
    for name in sorted(tensors.keys() - metadata.keys()):
        close = near(name, metadata)
        faults.append(f"{name} is not in it" + (f" (it has {close})" if close else ""))
    faults += [
        f"{n} is in it, but not in the run" for n in sorted(metadata.keys() - tensors.keys())
    ]
    for name in sorted(tensors.keys() & metadata.keys()):
        wanted, stored = tuple(tensors[name].shape), tuple(metadata[name].size)
        if wanted != stored:
            faults.append(f"{name} has the shape {stored} in it, and {wanted} in the run")
    return faults


def _group_differences(
    model: nn.Module, optimizer: Optimizer, saved: list[dict[str, Any]]
) -> list[str]:
    current = [group["names"] for group in _plain_state(model, optimizer)["groups"]]
    if [sorted(group["names"]) for group in saved] != [sorted(names) for names in current]:
        return [f"its optimizer has other parameter groups than {type(optimizer).__name__} now has"]
    return []


def full_state_dict(model: nn.Module, trainable: bool) -> dict[str, Tensor]:
    """See :meth:`core_plugin.types.distributed.BaseDistributed.full_state_dict`."""
    full = {}
    for name, tensor in model_tensors(model).items():
        if trainable and not tensor.requires_grad:
            continue
        whole = gather(tensor.detach())
        if _rank() == 0:
            full[name] = whole.cpu().clone()
    return full


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") or "none"

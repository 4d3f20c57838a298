"""From ``meta`` to memory: values that depend on the seed and on names alone."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from core_plugin.adapters.layer import AdapterLayer, AdapterModule
from core_plugin.adapters.names import SAVED, renamed
from core_plugin.errors import ConfigError, PluginContractError
from core_plugin.params import near
from core_plugin.tensors import canonical_name, copy_full, gather, is_sharded, local

Place = tuple[nn.Module, str]
"""Where a tensor is: the module that holds it, and the name there."""
Index = tuple[slice, ...]


class Materializer:
    """Gives modules on ``meta`` their memory on a device, and their values.

    Each module's random generator is seeded with the run's seed and the module's name, and the
    values are drawn on the CPU: they are the same for any strategy, number of ranks, order of the
    calls and device. What a weights file has comes from there.

    The model may have been sharded on ``meta``: a rank reads its part of a ``DTensor`` alone, and
    of what is drawn it keeps its part. No more than one module is whole at a time.

    Args:
        model: The whole model, which names its parts; nothing of it is sharded yet.
        device: Where the tensors shall live.
        seed: The run's seed.
        initialize: Fills what a module of the model owns itself.
        base_name: The name that a tensor had before adapters were added.
        weights: safetensors files with tensors by name.
        renames: See :attr:`core_plugin.types.model.BaseModel.renames`.
        parameter_device: Where the parameters shall live instead.

    Raises:
        ConfigError: The weights do not fit the model, with every name and shape that does not.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        seed: int,
        initialize: Callable[[nn.Module], None],
        base_name: Callable[[str], str],
        weights: Sequence[str] = (),
        renames: Mapping[str, str] | None = None,
        parameter_device: torch.device | None = None,
    ) -> None:
        self._device, self._parameter_device = device, parameter_device or device
        self._seed = seed
        self._initialize = initialize
        self._base_name = base_name
        self._names = {m: canonical_name(f"{n}.")[:-1] for n, m in model.named_modules()}
        self._places = _places(model)
        self._adapted: set[AdapterModule] = set()
        self._weights = _Weights(weights, renames or {})
        self._weights.check(
            {base_name(n): t for n, t in _persistent(model) if not _of_adapter(model, n)}
        )

    def __call__(self, part: nn.Module) -> None:
        """Materialise what is on ``meta`` in a part of the model."""
        # What is whole for the while is largest when least is there, and its memory is used again.
        modules = sorted(part.modules(), key=_whole_bytes, reverse=True)
        for module in modules:
            if isinstance(module, AdapterLayer):
                self._initialize_adapters(module)
            self._fill(module)
        for module in modules:
            if isinstance(module, AdapterModule):  # those at the model's door come last
                self._initialize_adapters(module)

    def _fill(self, module: nn.Module) -> None:
        """Make what a module has on ``meta``; of tied tensors, the first module is the owner."""
        for name, _ in list(_own_tensors(module)):
            if _at((module, name)).is_meta:
                self._make(self._owner(module, name)[0])

    def _make(self, owner: nn.Module) -> None:
        """Make what a module owns and has on ``meta``."""
        for name, values in self._values(owner, self._fresh(owner)).items():
            self._put((owner, name), self._made(_at((owner, name)), values))

    def _fresh(self, owner: nn.Module) -> list[str]:
        return [
            name
            for name, tensor in _own_tensors(owner)
            if tensor.is_meta and self._owner(owner, name)[0] is owner
        ]

    def _values(self, module: nn.Module, fresh: list[str]) -> dict[str, Callable[[Index], Tensor]]:
        """Where the values of a module's tensors come from: for each, what gives a part of it."""
        prefix = f"{self._names[module]}." if self._names[module] else ""
        names = {name: self._base_name(prefix + name) for name in fresh}
        adapter = getattr(module, "is_adapter", False)
        stored = {} if adapter else {n: f for n, f in names.items() if f in self._weights}
        drawn: dict[str, Tensor] = {}
        if len(stored) < len(names):
            with self._seeded(min(names.values())), _own_memory(module) as drawn:
                module.reset_parameters() if adapter else self._initialize(module)  # type: ignore[operator]
        return {
            name: partial(self._weights.read, stored[name])
            if name in stored
            else drawn[name].detach().__getitem__
            for name in fresh
        }

    def _made(self, target: Tensor, values: Callable[[Index], Tensor]) -> Tensor:
        """A tensor like one on ``meta``, of which this rank has the same part, with its values."""
        is_parameter = isinstance(target, nn.Parameter)
        device = self._parameter_device if is_parameter else self._device
        with torch.no_grad():
            made = part = values(_index(target))
            if (
                is_sharded(target)
                or (part.device, part.dtype) != (device, target.dtype)
                or part.untyped_storage().nbytes() > part.nbytes  # a file, or more than the part
            ):
                made = torch.empty_like(target, device=device, requires_grad=False)
                local(made).copy_(part)
        made = nn.Parameter(made, requires_grad=target.requires_grad) if is_parameter else made
        if not is_sharded(target):
            return made
        torch.utils.swap_tensors(target, made)  # it stays the object that the strategy knows
        return target

    def _initialize_adapters(self, module: AdapterModule) -> None:
        """Fill what depends on the base's values and the adapter's, which are whole for the while.

        They are on the CPU, so the adapters' values do not depend on a device either.
        """
        if module in self._adapted:
            return
        with self._whole(module):
            for inner in (m for m in module.modules() if isinstance(m, AdapterModule)):
                self._adapted.add(inner)
                for name in inner.adapters:
                    with self._seeded(f"{self._names[inner]}.{name}"):
                        inner.initialize(name)

    @contextmanager
    def _whole(self, part: nn.Module) -> Iterator[None]:
        """Let a part's tensors be whole and on the CPU, and made where they are on ``meta``."""
        inside = [self._owner(m, name) for m in part.modules() for name, _ in _own_tensors(m)]
        owners = list(dict.fromkeys(module for module, _ in inside))
        beside = [(module, name) for module in owners for name in self._fresh(module)]
        held = {place: _at(place) for place in [*inside, *beside]}
        for place, tensor in held.items():
            self._put(place, _whole(tensor))
        on_cpu = copy.copy(self)
        on_cpu._device = on_cpu._parameter_device = torch.device("cpu")
        for module in owners:
            on_cpu._make(module)
        yield
        for place, tensor in held.items():
            whole = _at(place).detach()
            if tensor.is_meta:
                self._put(place, self._made(tensor, whole.__getitem__))
            else:
                copy_full(tensor, whole)
                self._put(place, tensor)

    @contextmanager
    def _seeded(self, name: str) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(_seed(self._seed, name))
            yield

    def _owner(self, module: nn.Module, name: str) -> Place:
        return self._places[module, name][0]

    def _put(self, owner: Place, tensor: Tensor) -> None:
        """Put a tensor into all of its places."""
        for module, name in self._places[owner]:
            _assign(module, name, tensor)


class _Weights:
    """Tensors in safetensors files, by the names that they have now."""

    def __init__(self, files: Sequence[str], renames: Mapping[str, str]) -> None:
        self._files: dict[str, str] = {}
        self._stored: dict[str, str] = {}
        self._opened: dict[str, Any] = {f: safe_open(f, framework="pt") for f in files}
        for file, opened in self._opened.items():
            for stored in opened.keys():  # noqa: SIM118 (it is no mapping)
                name = renamed(stored, renames)
                self._files[name], self._stored[name] = file, stored

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def check(self, wanted: Mapping[str, Tensor]) -> None:
        """Check that the files have the model's tensors, in their shapes, and no others."""
        if not self._opened:
            return
        faults = [
            f"{name} is in no weights file"
            + (f" (there is {close})" if (close := near(name, self._files)) else "")
            for name in sorted(wanted.keys() - self._files.keys())
        ]
        faults += [
            f"{self._files[name]} has {name}, which the model has not"
            for name in sorted(self._files.keys() - wanted.keys())
        ]
        faults += [
            f"{self._files[name]}: {name} has the shape {shape}, the model's has "
            f"{tuple(wanted[name].shape)}"
            for name in sorted(self._files.keys() & wanted.keys())
            if (shape := tuple(self._slice(name).get_shape())) != tuple(wanted[name].shape)
        ]
        if faults:
            raise ConfigError("the weights do not fit the model:\n  " + "\n  ".join(faults))

    def read(self, name: str, index: Index) -> Tensor:
        """A part of a tensor; no more is read."""
        values: Tensor = self._slice(name)[index]
        return values

    def _slice(self, name: str) -> Any:
        return self._opened[self._files[name]].get_slice(self._stored[name])


def _places(model: nn.Module) -> dict[Place, list[Place]]:
    """For each place all places of the tensor there; the first one is its owner's."""
    tied: dict[int, list[Place]] = {}
    places = {}
    for module in model.modules():
        for name, tensor in _own_tensors(module):
            places[module, name] = tied.setdefault(id(tensor), [])
            places[module, name].append((module, name))
    return places


def _persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the state dict by name; of tied ones, the first name only."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _of_adapter(model: nn.Module, name: str) -> bool:
    """Whether a tensor is an adapter's, as the copy of one of the model's is, too."""
    if SAVED in name.split("."):
        return True
    return getattr(model.get_submodule(name.rpartition(".")[0]), "is_adapter", False)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _at(place: Place) -> Tensor:
    module, name = place
    return getattr(module, name)  # type: ignore[no-any-return]


def _whole_bytes(module: nn.Module) -> int:
    """The bytes that making a module needs at once; an adapter layer is made with its base."""
    parts = module.modules() if isinstance(module, AdapterLayer) else [module]
    return sum(tensor.nbytes for part in parts for _, tensor in _own_tensors(part))


def _assign(module: nn.Module, name: str, tensor: Tensor) -> None:
    if name in module._parameters:
        module._parameters[name] = tensor  # type: ignore[assignment]
    else:
        module._buffers[name] = tensor


@contextmanager
def _own_memory(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Let a module have whole tensors of its own on the CPU for the while; they are given."""
    own = dict(_own_tensors(module))
    memory = {name: _like(tensor, torch.device("cpu")) for name, tensor in own.items()}
    try:
        for name, tensor in memory.items():
            _assign(module, name, tensor)
        yield memory
        memory.update(_own_tensors(module))
    finally:
        for name, tensor in own.items():
            _assign(module, name, tensor)


def _whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded, on the CPU, or on ``meta`` if it is there."""
    if tensor.is_meta:
        return _like(tensor, tensor.device)
    whole = gather(tensor.detach()).cpu()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(whole, requires_grad=tensor.requires_grad)
    return whole


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for the whole of a tensor, of the same kind: a parameter's flags are kept."""
    if is_sharded(tensor):
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        empty = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _index(tensor: Tensor) -> Index:
    """Which part of the whole this rank has."""
    if not is_sharded(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
        raise PluginContractError(
            f"a tensor on meta is sharded as {tensor.placements}, of which a rank's part is no "
            "slice; materialise it before it is sharded"
        )
    sizes, starts = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(start, start + n) for start, n in zip(starts, sizes, strict=True))


def _seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1

"""From ``meta`` to memory: values that depend on the seed and on names alone."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from safetensors import safe_open
from torch import Tensor, nn

from core_plugin.adapters.layer import AdapterModule
from core_plugin.adapters.names import renamed
from core_plugin.errors import ConfigError
from core_plugin.params import near


class Materializer:
    """Gives modules on ``meta`` their memory on a device, and their values.

    Each module's random generator is seeded with the run's seed and the module's name, and the
    values are drawn on the CPU: they are the same for any strategy, number of ranks, order of the
    calls and device. What a weights file has comes from there.

    Args:
        model: The whole model, which names its parts.
        device: Where the tensors shall live.
        seed: The run's seed.
        initialize: Fills what a module of the model owns itself.
        base_name: The name that a tensor had before adapters were added.
        weights: safetensors files with tensors by name.
        renames: See :attr:`core_plugin.types.model.BaseModel.renames`.
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
    ) -> None:
        self._device = device
        self._seed = seed
        self._initialize = initialize
        self._base_name = base_name
        self._names = {module: name for name, module in model.named_modules()}
        self._owners: dict[int, nn.Module] = {}
        self._places: Counter[int] = Counter()
        for module in model.modules():
            for _, tensor in _own_tensors(module):
                self._owners.setdefault(id(tensor), module)
                self._places[id(tensor)] += 1
        self._tied: dict[int, Tensor] = {}  # what is made, and not in all of its places yet
        self._meta: list[Tensor] = []  # keeps their ids from being used again
        self._adapted: set[AdapterModule] = set()
        self._weights = _Weights(weights, renames or {})
        self._weights.check(
            base_name(n) for n, _ in _persistent(model) if not _of_adapter(model, n)
        )

    def __call__(self, part: nn.Module) -> None:
        """Materialise what is on ``meta`` in a part of the model."""
        for module in part.modules():
            for name, tensor in list(_own_tensors(module)):
                if getattr(module, name).is_meta:
                    if id(tensor) not in self._tied:
                        self._fill(self._owners[id(tensor)])
                    if module is not self._owners[id(tensor)]:
                        self._put(module, name, tensor, self._tied[id(tensor)])
        for module in part.modules():
            if isinstance(module, AdapterModule) and module not in self._adapted:
                self._initialize_adapters(module)

    def _initialize_adapters(self, module: AdapterModule) -> None:
        """Fill what depends on the base's values and the adapter's."""
        self._adapted.add(module)
        for name in module.adapters:
            with self._seeded(f"{self._names[module]}.{name}"):
                module.initialize(name)

    @contextmanager
    def _seeded(self, name: str) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(_seed(self._seed, name))
            yield

    def _put(self, module: nn.Module, name: str, meta: Tensor, made: Tensor) -> None:
        """Put what was made for a tensor into one of its places; no more is held than is tied."""
        _assign(module, name, made)
        self._places[id(meta)] -= 1
        self._tied[id(meta)] = made
        if not self._places[id(meta)]:
            del self._tied[id(meta)]

    def _fill(self, module: nn.Module) -> None:
        """Make what a module owns itself; of tied tensors, the first module is the owner."""
        own = dict(_own_tensors(module))
        fresh = {n: t for n, t in own.items() if t.is_meta and self._owners[id(t)] is module}
        for name, tensor in own.items():
            _assign(module, name, _on_cpu(tensor))
        prefix = f"{self._names[module]}." if self._names[module] else ""
        names = {name: self._base_name(prefix + name) for name in fresh}
        adapter = getattr(module, "is_adapter", False)
        stored = {} if adapter else {n: f for n, f in names.items() if f in self._weights}
        if len(stored) < len(names):
            with self._seeded(min(names.values())):
                module.reset_parameters() if adapter else self._initialize(module)  # type: ignore[operator]
        for name, full_name in stored.items():
            self._weights.read(full_name, getattr(module, name))
        for name, tensor in own.items():
            if name in fresh:
                self._meta.append(tensor)
                made = _on_device(getattr(module, name), self._device)
                self._put(module, name, tensor, made)
            else:
                _assign(module, name, tensor)


class _Weights:
    """Tensors in safetensors files, by the names that they have now."""

    def __init__(self, files: Sequence[str], renames: Mapping[str, str]) -> None:
        self._files: dict[str, str] = {}
        self._stored: dict[str, str] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for stored in opened.keys():  # noqa: SIM118 (it is no mapping)
                    name = renamed(stored, renames)
                    self._files[name], self._stored[name] = file, stored

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def check(self, names: Iterator[str]) -> None:
        if not self._files:
            return
        wanted = set(names)
        faults = [
            f"{name} is in no weights file"
            + (f" (there is {close})" if (close := near(name, self._files)) else "")
            for name in sorted(wanted - self._files.keys())
        ]
        faults += [
            f"{self._files[name]} has {name}, which the model has not"
            for name in sorted(self._files.keys() - wanted)
        ]
        if faults:
            raise ConfigError("the weights do not fit the model:\n  " + "\n  ".join(faults))

    def read(self, name: str, target: Tensor) -> None:
        with safe_open(self._files[name], framework="pt") as opened:
            tensor = opened.get_tensor(self._stored[name])
        if tensor.shape != target.shape:
            raise ConfigError(
                f"{self._files[name]}: {name} has the shape {tuple(tensor.shape)}, "
                f"the model's has {tuple(target.shape)}"
            )
        with torch.no_grad():
            target.copy_(tensor)


def _persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the state dict by name; of tied ones, the first name only."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _of_adapter(model: nn.Module, name: str) -> bool:
    return getattr(model.get_submodule(name.rpartition(".")[0]), "is_adapter", False)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _assign(module: nn.Module, name: str, tensor: Tensor) -> None:
    if name in module._parameters:
        module._parameters[name] = tensor  # type: ignore[assignment]
    else:
        module._buffers[name] = tensor


def _on_cpu(tensor: Tensor) -> Tensor:
    """Memory for a tensor, of the same kind: a parameter's class and flags are kept."""
    empty = torch.empty_like(tensor, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    moved = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved


def _seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1

"""What a method's layers derive from."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from core_plugin.adapters.names import BASE_LAYER
from core_plugin.errors import PluginContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from core_plugin.types.peft import BasePeft


class AdapterLayer(nn.Module):
    """Stands in for a layer of the model, and holds it, and the parameters of its adapters.

    Every child other than ``base_layer`` has a name that begins with the method's prefix, and
    holds one entry an adapter under the adapter's name: it is an ``nn.ModuleDict`` of modules, or
    :class:`AdapterParameters`. Every module of an adapter that owns tensors itself has
    ``is_adapter = True`` and a ``reset_parameters()`` that fills all of them.

    What the layer lacks, it takes from the base layer (``in_features``, ``weight``, ...), so that
    the model's own code goes on as before.
    """

    base_layer: nn.Module
    method: type[BasePeft]
    """Whose layer this is; the engine says so."""
    active: str | None
    """The adapter that the forward pass uses; None for the base layer alone."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.active = None
        self.training = base_layer.training

    @abstractmethod
    def add_adapter(self, name: str, params: Any) -> None:
        """Make an adapter's parameters, on the base layer's device, and initialise them."""

    def activate(self, name: str | None) -> None:
        """Choose the adapter that the forward pass uses; without one of that name, none.

        What a method's forward pass needs is decided here, once, and not in each step.
        """
        self.active = name if name in self.adapters() else None

    def adapters(self) -> set[str]:
        """The names of the adapters that the layer holds."""
        return {name for _, child in self._holders() for name in child}

    def adapter_parameters(self, name: str) -> Iterator[tuple[str, nn.Parameter]]:
        """One adapter's parameters, by their names in this layer."""
        for holder, child in self._holders():
            if name not in child:
                continue
            entry = child[name]
            if isinstance(entry, nn.Parameter):
                yield f"{holder}.{name}", entry
            else:
                for own, parameter in entry.named_parameters():
                    yield f"{holder}.{name}.{own}", parameter

    def check(self) -> None:
        """Check that the adapters' parameters are where they are looked for.

        Raises:
            PluginContractError: Some are not: they would not be trained, initialised or saved.
        """
        modules = {n: m for n, m in self.named_modules() if n.partition(".")[0] != BASE_LAYER}
        own = {n for n, _ in self.named_parameters() if n.partition(".")[0] != BASE_LAYER}
        held = {n for name in self.adapters() for n, _ in self.adapter_parameters(name)}
        faults = [f"{name} is in no container with the adapter's name" for name in own - held]
        faults += [
            f"{name} does not begin with the method's prefix {self.method.prefix!r}"
            for name in own
            if not name.startswith(self.method.prefix)
        ]
        faults += [
            f"{name} has tensors, but lacks is_adapter or reset_parameters()"
            for name, module in modules.items()
            if _owns_tensors(module)
            and not (getattr(module, "is_adapter", False) and hasattr(module, "reset_parameters"))
        ]
        if faults:
            raise PluginContractError(
                f"{type(self).__module__}.{type(self).__qualname__}: {'; '.join(sorted(faults))}"
            )

    def _holders(self) -> Iterator[tuple[str, Any]]:
        return ((name, child) for name, child in self.named_children() if name != BASE_LAYER)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == BASE_LAYER or name.startswith("__"):
                raise
            return getattr(self.base_layer, name)


def _owns_tensors(module: nn.Module) -> bool:
    return bool([*module.parameters(recurse=False), *module.buffers(recurse=False)])


class AdapterParameters(nn.ParameterDict):
    """Parameters of a layer's adapters, one an adapter, that are initialised alike."""

    is_adapter = True

    def __init__(self, initialize: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.initialize = initialize

    def add(self, name: str, shape: Sequence[int], base: nn.Module) -> None:
        """Make an adapter's parameter, on a base layer's device, and initialise it."""
        self[name] = nn.Parameter(torch.empty(*shape, **tensor_options(base)))
        self._fill(self[name])

    def reset_parameters(self) -> None:
        """Initialise all of them."""
        for parameter in self.values():
            self._fill(parameter)

    def _fill(self, parameter: Tensor) -> None:
        with torch.no_grad():
            self.initialize(parameter)


class TensorOptions(TypedDict):
    """How an adapter's tensors are made."""

    device: torch.device
    dtype: torch.dtype


def tensor_options(base: nn.Module) -> TensorOptions:
    """The device and dtype of the tensors of an adapter for a base layer.

    Adapters are trained, so they are float32 even if the base is stored in fewer bits.
    """
    parameter = next(base.parameters())
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return {"device": parameter.device, "dtype": dtype}

"""What the modules of a method derive from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from core_plugin.adapters.names import BASE_LAYER
from core_plugin.errors import ConfigError, PluginContractError
from core_plugin.tensors import is_sharded

if TYPE_CHECKING:
    from core_plugin.types.peft import BasePeft

PLACES = frozenset(
    {
        "exclude_modules",
        "layers_pattern",
        "layers_to_transform",
        "modules_to_save",
        "target_modules",
        "target_parameters",
        "task_type",
    }
)
"""The parameters that say which places have an adapter; a file's tensors say it too."""


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter of a model; every module that holds a part of it refers to the same object."""

    name: str
    method: type[BasePeft]
    params: Any
    """The method's ``Params`` that the adapter was made with."""
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What its ``adapter_config.json`` said that nobody here knows, to be written back."""


class AdapterModule(nn.Module):
    """Holds parameters of a model's adapters.

    Each of its own children (``base_layer`` is none) has a name that begins with the method's
    prefix, and holds one entry an adapter under the adapter's name: it is an ``nn.ModuleDict`` of
    modules, or :class:`AdapterParameters`. Every module of an adapter that owns tensors itself
    has ``is_adapter = True`` and a ``reset_parameters()`` that fills all of them.
    """

    prefix: ClassVar[str | None] = None
    """What the children's names begin with, if it is not the method's prefix."""
    samples: bool = True
    """Whether the forward pass may be done for some samples of a batch at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters: dict[str, Adapter] = {}
        """The adapters that the module holds a part of, by name."""
        self.params: dict[str, Any] = {}
        """The parameters of each here: those of the adapter, changed as its patterns say."""
        self.active: tuple[str, ...] = ()
        """The adapters that are chosen, in order; some may not be held here."""
        self.enabled = True
        self.used: tuple[str, ...] = ()
        """The adapters that the forward pass applies: active, held here, enabled, not merged."""

    # What a method's own modules define

    def add_adapter(self, name: str, params: Any) -> None:
        """Make an adapter's parameters, on the base's device, and initialise them.

        Args:
            name: The adapter.
            params: The method's ``Params`` for this place.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """Note what the forward pass needs; called whenever ``used`` may have changed."""

    def initialize(self, name: str) -> None:
        """Fill what depends on the base's values and the adapter's, which are all there.

        Called once for each new adapter, after ``reset_parameters`` of its modules and after the
        base's values are known. It may change the base. What is outside of this module may be
        sharded; :func:`core_plugin.tensors.call_whole` calls it all the same.
        """

    def converted(
        self, name: str, params: Any, tensors: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """The tensors of other settings, as they have to be to do the same with those held here.

        Values that come in the place of a held adapter's leave a compiled model compiled. The
        default takes the same settings, apart from what matters in training alone.

        Args:
            name: The adapter that is held.
            params: The other's parameters here; None if it has no part here.
            tensors: The other's, by their names in a file; empty if it has no part here.

        Raises:
            ConfigError: There are none that do the same.
        """
        method = self.adapters[name].method
        if params is None:
            raise ConfigError("it has no tensors for this module")
        held, other = method.config(self.params[name]), method.config(params)
        for key in sorted(held.keys() - PLACES - method.patterns.keys()):
            if not method.same_result(key, other[key], held[key]):
                raise ConfigError(f"{key} is {other[key]!r}, and {held[key]!r} in the model")
        return tensors

    def clash(self, names: Sequence[str]) -> str | None:
        """Why several adapters that are held here cannot apply at once, or None."""
        return None

    @classmethod
    def changes_base(cls, params: Any) -> bool:
        """Whether :meth:`initialize` changes the base's own weight."""
        return False

    # What the engine calls

    def add(self, adapter: Adapter, params: Any) -> None:
        """Make a new adapter's part; it is not active yet."""
        self.adapters[adapter.name] = adapter
        self.params[adapter.name] = params
        self.add_adapter(adapter.name, params)

    def remove(self, name: str) -> None:
        """Forget an adapter."""
        for _, holder in self._holders():
            if name in holder:
                del holder[name]
        del self.adapters[name], self.params[name]
        self.activate(tuple(n for n in self.active if n != name))

    def activate(self, names: Sequence[str]) -> None:
        """Choose the adapters that the forward pass applies."""
        self.active = tuple(names)
        self._resettle()

    def enable(self, enabled: bool) -> None:
        """Let the forward pass apply the active adapters, or none."""
        self.enabled = enabled
        self._resettle()

    def _resettle(self) -> None:
        self.used = self._applied()
        self.settle()

    def _applied(self) -> tuple[str, ...]:
        return tuple(n for n in self.active if n in self.adapters) if self.enabled else ()

    def adapter_parameters(self, name: str) -> Iterator[tuple[str, str, nn.Parameter]]:
        """One adapter's parameters: the name in this module, the name in a file, the tensor.

        ``lora_A.default.weight`` is ``lora_A.weight`` in a file.
        """
        for path, holder in self._holders():
            if name not in holder:
                continue
            entry = holder[name]
            if isinstance(entry, nn.Parameter):
                yield f"{path}.{name}", path, entry
            else:
                for own, parameter in entry.named_parameters():
                    yield f"{path}.{name}.{own}", f"{path}.{own}", parameter

    def adapter_tensors(self, name: str) -> Iterator[tuple[str, str, Tensor]]:
        """What an adapter's file holds of this module, as :meth:`adapter_parameters` gives it.

        That is its parameters; where modules are saved whole, under all names of tied ones, and
        with their buffers.
        """
        return self.adapter_parameters(name)

    def _holders(self) -> Iterator[tuple[str, Any]]:
        """The containers with an entry an adapter, by their paths in this module."""
        return ((name, child) for name, child in self.named_children() if name != BASE_LAYER)

    def check(self, prefix: str) -> None:
        """Check that the adapters' parameters are where they are looked for.

        Raises:
            PluginContractError: Some are not: they would not be trained, initialised or saved.
        """
        prefix = self.prefix or prefix
        modules = {n: m for n, m in self.named_modules() if n.partition(".")[0] != BASE_LAYER}
        own = {n for n, _ in self.named_parameters() if n.partition(".")[0] != BASE_LAYER}
        held = {n for name in self.adapters for n, _, _ in self.adapter_parameters(name)}
        faults = [f"{name} is in no container with the adapter's name" for name in own - held]
        faults += [
            f"{name} does not begin with the prefix {prefix!r}"
            for name in own
            if not name.startswith(prefix)
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


class AdapterLayer(AdapterModule):
    """Stands in for a layer of the model, and holds it, and the parameters of its adapters.

    What the layer lacks, it takes from the base layer (``in_features``, ``weight``, ...), so that
    the model's own code goes on as before. Calls have the base layer's arguments; the first
    dimension of the first one is the batch's.
    """

    base_layer: nn.Module
    changes: tuple[str, ...] = ("weight",)
    """The tensors of :attr:`owner` that :meth:`merge_into` changes."""
    inner_layers: tuple[str, ...] = ()
    """The modules in :attr:`owner` that it adapts too, and that a file has layers for."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.training = base_layer.training
        self.merged: tuple[str, ...] = ()
        """The adapters that are merged into the model; some may not be held here."""
        self.originals: dict[str, Tensor] = {}
        """While adapters are merged: the tensors of :attr:`changes` that are not in place. These
        are the owner's own ones, or the merged ones while the layer is not enabled.
        """

    @property
    def owner(self) -> nn.Module:
        """The model's own module, which owns the tensors of :attr:`changes`."""
        owner = self.base_layer
        while isinstance(owner, AdapterLayer):
            owner = owner.base_layer
        return owner

    # What a method's own layers define

    @classmethod
    def fault(cls, base: nn.Module, params: Any) -> str | None:
        """Why a base layer cannot have an adapter with these parameters, or None."""
        return None

    def merge_fault(self, name: str) -> str | None:
        """Why an adapter cannot be merged into the base layer, or None."""
        if type(self).merge_into is AdapterLayer.merge_into:
            return f"a {type(self).__name__} cannot be merged"
        return None

    def merge_into(self, tensors: Mapping[str, Tensor], name: str) -> None:
        """Change tensors in place as an adapter changes what the base layer computes.

        Args:
            tensors: The base layer's, by the names of :attr:`changes`, in float32 or float64. Of
                a sharded model they are whole, and so are the adapter's own for the while.
            name: The adapter.
        """
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the base layer, with the adapters of :attr:`used`."""
        raise NotImplementedError

    # What the engine calls

    def enable(self, enabled: bool) -> None:
        """See :meth:`AdapterModule.enable`. What is merged goes and comes back with the rest."""
        if self.merged and enabled != self.enabled:
            self.exchange()
        super().enable(enabled)

    def exchange(self) -> None:
        """Put :attr:`originals` in place, and keep there what was.

        Of sharded tensors the values change places, since ``fully_shard`` goes on using its own.
        """
        for name, other in self.originals.items():
            held, own = self.holder(name)
            if is_sharded(other):
                with torch.no_grad():
                    values = other.detach().clone()
                    other.copy_(held[own])
                    held[own].copy_(values)
            else:
                self.originals[name], held[own] = held[own], other

    def holder(self, name: str) -> tuple[dict[str, Any], str]:
        """Where the owner, or a module in it, holds a tensor, and the name there."""
        path, _, own = name.rpartition(".")
        module = self.owner.get_submodule(path)
        return (module._buffers if own in module._buffers else module._parameters), own

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for tensor in self.originals.values():
            tensor.data = fn(tensor.data)
        return self

    def _applied(self) -> tuple[str, ...]:
        return () if self.merged else super()._applied()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == BASE_LAYER or name.startswith("__"):
                raise
            return getattr(self.base_layer, name)


class ParameterLayer(AdapterLayer):
    """Stands in for a module, to adapt one parameter that the module holds itself.

    Args:
        base_layer: The module; for a second parameter, the layer of the first one.
        parameter: The parameter's name in the module.
    """

    def __init__(self, base_layer: nn.Module, parameter: str) -> None:
        super().__init__(base_layer)
        self.parameter = parameter
        self.changes = (parameter,)

    @classmethod
    def fault(cls, base: nn.Module, params: Any, parameter: str = "") -> str | None:
        """See :meth:`AdapterLayer.fault`; here it is asked about a parameter of the module."""
        return None


class ModelAdapter(AdapterModule):
    """Adapts a model at its door: its inputs and outputs, and no layer of it.

    It becomes a child of the model, which is not to be a child of it.

    Args:
        model: The model; it is not changed before :meth:`attach`.
    """

    child: ClassVar[str]
    """What the child is called; it begins with the method's prefix."""
    samples = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.hooks: list[RemovableHandle] = []
        """What :meth:`attach` registered."""

    @classmethod
    def fault(cls, model: nn.Module, params: Any) -> str | None:
        """Why a model cannot have an adapter with these parameters, or None."""
        return None

    def attach(self, model: nn.Module) -> None:
        """Register the hooks; called once, when the module is in the model."""
        raise NotImplementedError

    def detach(self) -> None:
        """Remove the hooks; called when the module leaves the model."""
        for hook in self.hooks:
            hook.remove()


def _owns_tensors(module: nn.Module) -> bool:
    return bool([*module.parameters(recurse=False), *module.buffers(recurse=False)])


class AdapterParameters(nn.ParameterDict):
    """Parameters of adapters, one an adapter, that are initialised alike."""

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
        if not parameter.is_meta:
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

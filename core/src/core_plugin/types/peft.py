"""Parameter-efficient fine-tuning methods, and layers that they get from elsewhere."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from core_plugin.contract import Implementation
from core_plugin.errors import PluginConflictError, PluginContractError
from core_plugin.plugin import BasePlugin, Registration, Resolved, origin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from core_plugin.adapters.layer import AdapterLayer, ModelAdapter

T = TypeVar("T")

ADAPTER = "default"
"""The name of the adapter that a run trains."""
ALL_LINEAR = "all-linear"

Rule = str | list[str]
"""Which modules are meant.

A string is a regular expression for the whole path of a module; an entry of a list is a path, or
the end of one after a dot: ``q_proj`` is ``layers.0.q_proj`` but not ``my_q_proj``.
"""

TaskType = Literal[
    "CAUSAL_LM", "SEQ_2_SEQ_LM", "SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"
]


@dataclasses.dataclass(frozen=True)
class PeftParams:
    """The parameters of every method that changes layers; its own ``Params`` derives from it.

    A method's ``Params`` may also have ``target_parameters`` (a list of paths of parameters, or
    their ends after a dot), ``trainable_token_indices`` (the rows of the input embedding that are
    trained, or rows by the name of an embedding) and ``bias`` (``none``, ``all``, or another word
    for the biases of adapted layers alone): the engine does what they say.
    """

    target_modules: Rule | None = None
    """The layers that get an adapter; ``all-linear``: every linear one but the output head. None
    takes what the model's architecture says of the method, or else ``all-linear``.
    """
    exclude_modules: Rule | None = None
    """The layers that get none, whatever ``target_modules`` says."""
    layers_to_transform: int | list[int] | None = None
    """The numbers of the blocks whose layers get an adapter; None: all."""
    layers_pattern: Rule | None = None
    """The names of the lists of blocks that ``layers_to_transform`` counts in; None: the first
    number in a module's path is its block's.
    """
    modules_to_save: list[str] | None = None
    """Modules that are trained whole, in a copy that belongs to the adapter."""
    task_type: TaskType | None = None
    """What the model is for; with a classifier's or a question answerer's, its head is saved."""
    weights: str | None = None
    """A directory with an adapter's files to start from."""

    def __post_init__(self) -> None:
        for field in ("target_modules", "exclude_modules", "layers_pattern"):
            check_rule(field, getattr(self, field))
        if self.layers_pattern is not None and self.layers_to_transform is None:
            raise ValueError("layers_pattern says where layers_to_transform counts; set that too")
        regular = isinstance(self.target_modules, str) and self.target_modules.lower() != ALL_LINEAR
        if regular and self.layers_to_transform is not None:
            raise ValueError(
                "layers_to_transform goes with a list of target_modules; a regular expression can "
                "say which blocks itself"
            )


def check_rule(field: str, rule: Rule | None) -> None:
    """Check a field that is a rule, for a ``Params``' ``__post_init__``.

    Raises:
        ValueError: It is no regular expression, or no list of names.
    """
    if isinstance(rule, str):
        try:
            re.compile(rule)
        except re.error as error:
            raise ValueError(f"{field}: {rule!r} is not a regular expression: {error}") from None
    elif rule is not None:
        if any(not isinstance(entry, str) or not entry for entry in rule):
            raise ValueError(f"{field}: a list holds names of modules, got {rule!r}")
        if any(entry.lower() == ALL_LINEAR for entry in rule):
            raise ValueError(f"{field}: all-linear stands alone and not in a list, got {rule!r}")


class BasePeft(Implementation, abstract=True):
    """A method: its parameters, its layer for each kind of base layer, its prefix, and whether
    its layers mix with another method's. Matching, replacing, freezing, switching, merging and
    files are the engine's (:mod:`core_plugin.adapters`).
    """  # noqa: D205

    Params: ClassVar[type] = PeftParams
    peft_type: ClassVar[str]
    """What the peft library's files call the method: its name in upper case, such as ``LORA``."""
    prefix: ClassVar[str]
    """What the names of the method's parameters begin with, such as ``lora_``: lower case, and
    its own.
    """
    mixes: ClassVar[bool] = False
    """Whether a model may hold this method's layers and another's at once."""
    patterns: ClassVar[Mapping[str, str]] = {}
    """Fields of ``Params`` that change another field where they match.

    ``{"rank_pattern": "r"}``: ``rank_pattern`` is a mapping of names of modules to values of
    ``r``. A field that is a rule, and no mapping, makes the other one True where it matches.
    """
    training_only: ClassVar[frozenset[str]] = frozenset()
    """What of ``config`` may differ when an adapter is loaded, since it changes no result."""
    neutral: ClassVar[Mapping[str, Any]] = {}
    """Fields of the peft library's configuration that ``Params`` lacks, each with the value with
    which it changes nothing. A file with another value is refused.
    """
    file_defaults: ClassVar[Mapping[str, Any]] = {}
    """What fields of ``Params`` are in a file that lacks them, if not what they are here."""

    def __init_subclass__(cls, *, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(abstract=abstract, **kwargs)
        prefix, peft_type = getattr(cls, "prefix", None), getattr(cls, "peft_type", None)
        if not abstract and not re.fullmatch(r"[a-z][a-z0-9_]*_", str(prefix)):
            raise PluginContractError(
                f"{cls.__module__}.{cls.__qualname__}: prefix is lower-case letters, digits and "
                f"underscores, and ends with one, such as 'lora_'; got {prefix!r}"
            )
        if not abstract and not re.fullmatch(r"[A-Z][A-Z0-9_]*", str(peft_type)):
            raise PluginContractError(
                f"{cls.__module__}.{cls.__qualname__}: peft_type is the method's name in upper "
                f"case, such as 'LORA'; got {peft_type!r}"
            )

    @staticmethod
    def layers() -> Mapping[type[nn.Module | nn.Parameter] | str, type[AdapterLayer]]:
        """The adapter layer class for each type of base layer, which stands for its subclasses too.

        A type is a class, or, so that its package need not be there, its full name
        (``package.module.Class``). ``nn.Parameter`` stands for a parameter that a module holds
        itself; its class is a :class:`core_plugin.adapters.layer.ParameterLayer`.
        """
        return {}

    @classmethod
    def layer_class(cls, kind: type) -> type[AdapterLayer] | None:
        """The adapter layer class for a type of base layer, or None if there is none.

        The nearest of the type and its bases decides: what a package brings for it
        (:class:`AdapterLayerPlugin`), or else what :meth:`layers` has.
        """
        own = cls.layers()
        for base in kind.__mro__:
            full_name = f"{base.__module__}.{base.__qualname__}"
            brought = f"{cls.peft_type.lower()}.{full_name}"
            if brought in AdapterLayerPlugin.names():
                return AdapterLayerPlugin(brought)()  # type: ignore[no-any-return]
            if base in own or full_name in own:
                return own[base if base in own else full_name]
        return None

    @staticmethod
    def model_adapter() -> type[ModelAdapter] | None:
        """The class that adapts a model at its door; None for a method that changes layers."""
        return None

    @classmethod
    def config(cls, params: Any) -> Mapping[str, Any]:
        """The method's part of ``adapter_config.json``, in the words of the peft library.

        It holds all that a result depends on besides the tensors. The default has the fields of
        ``Params``, and ``neutral``.
        """
        fields = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
        fields.pop("weights", None)
        return {**cls.neutral, **fields, "peft_type": cls.peft_type}

    @classmethod
    def same_result(cls, field: str, one: Any, other: Any) -> bool:
        """Whether two values of a field of :meth:`config` do the same with the same tensors.

        The default takes other values for fields that are ``training_only``.
        """
        return one == other or field in cls.training_only

    @classmethod
    def adapt(cls, model: nn.Module, params: Any, defaults: Mapping[str, Any]) -> None:
        """Put an adapter into a model in place, and freeze all else. The model may be on ``meta``.

        Args:
            model: The model.
            params: The implementation's ``Params``.
            defaults: What the model's architecture says of parameters that are None.

        Raises:
            ConfigError: Targets match nothing, or something that has no adapter layer; nothing
                was changed.
        """
        from core_plugin.adapters import inject

        inject(model, cls, params, ADAPTER, defaults=defaults)

    @classmethod
    def prepare(
        cls,
        model: nn.Module,
        params: Any,
        batches: Iterable[Mapping[str, Tensor]],
        forward: Callable[[nn.Module, Any], object],
    ) -> None:
        """Let a new adapter start from data; called once in a run, before its first step.

        Args:
            model: The model, which may be sharded, in evaluation mode and without gradients.
            params: The implementation's ``Params``.
            batches: What the first steps train on, whole: the same on all ranks.
            forward: Runs the model on a batch.
        """

    @staticmethod
    def base_name(name: str) -> str:
        """The name that a tensor of the model had before :meth:`adapt`."""
        from core_plugin.adapters import base_name

        return base_name(name)

    @classmethod
    def save(cls, directory: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Write the adapter in the format of the peft library.

        Args:
            directory: Where to.
            model: The model that has it; its own tensors are not read.
            tensors: The trained parameters, whole, by their names in the model.
        """
        from core_plugin.adapters import save_adapter

        save_adapter(directory, model, ADAPTER, tensors=tensors)

    @classmethod
    def load(cls, directory: Path, model: nn.Module, renames: Mapping[str, str]) -> None:
        """Read an adapter's files into the model, which has one and may be sharded.

        Args:
            directory: Where they are.
            model: The model.
            renames: See :attr:`core_plugin.types.model.BaseModel.renames`.

        Raises:
            CheckpointError: They are not for this adapter; nothing was changed.
        """
        from core_plugin.adapters import load_adapter

        load_adapter(model, directory, ADAPTER, renames=renames)


class PeftPlugin(BasePlugin, contract=BasePeft):
    """The type of PEFT methods.

    A method's name is lower-case, and its ``peft_type`` in upper case; its prefix belongs to it
    and to what derives from it. That is checked when it is registered in the process, and when
    it is loaded.
    """

    _prefixes: ClassVar[dict[str, tuple[Any, str]]] = {}
    """The method that a prefix belongs to, and where that comes from."""

    def register(self, *, override: bool = False) -> Callable[[T], T]:
        """See :meth:`core_plugin.plugin.BasePlugin.register`.

        Raises:
            PluginContractError: The name is not in lower case, or not that of ``peft_type``.
            PluginConflictError: The prefix is another method's.
        """
        decorate = super().register(override=override)

        def checked(method: T) -> T:
            self._check(method, origin_of(method))
            return decorate(method)

        return checked

    def _load(self, registration: Registration) -> Resolved:
        resolved = super()._load(registration)
        self._check(resolved.implementation, registration.origin)
        return resolved

    def _check(self, method: Any, origin: str) -> None:
        name = self.name.rpartition(":")[2]
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise PluginContractError(
                f"PeftPlugin {name!r} ({origin}): a method's name is lower-case letters, digits "
                "and underscores"
            )
        prefix, peft_type = getattr(method, "prefix", None), getattr(method, "peft_type", None)
        if prefix is None or peft_type is None:
            return  # what it lacks is told when it is resolved
        if peft_type != name.upper():
            raise PluginContractError(
                f"PeftPlugin {name!r} ({origin}): its peft_type is {peft_type!r}, and has to be "
                f"{name.upper()!r}, by which a file finds the method again"
            )
        owner, where = self._prefixes.setdefault(prefix, (method, origin))
        if owner.peft_type != peft_type and not issubclass(method, owner):
            other = owner.peft_type.lower()
            raise PluginConflictError(
                f"the PEFT methods {other!r} ({where}) and {name!r} ({origin}) both use the prefix "
                f"{prefix!r}, by which tensors are told apart; one of them has to choose another"
            )

    @classmethod
    def from_pretrained(
        cls,
        model: nn.Module,
        directory: Path | str,
        name: str = ADAPTER,
        *,
        trainable: bool = False,
        renames: Mapping[str, str] | None = None,
    ) -> type[BasePeft]:
        """Put the adapter that a directory holds into a model, whatever its method is.

        Args:
            model: The model, with real tensors.
            directory: Where ``adapter_config.json`` and ``adapter_model.safetensors`` are.
            name: What to call the adapter.
            trainable: Whether it is to be trained on.
            renames: See :attr:`core_plugin.types.model.BaseModel.renames`.

        Returns:
            The method.

        Raises:
            PluginNotFoundError: No installed package has the method.
            CheckpointError, ConfigError: The adapter is broken, or not for this model, which was
                not changed.
        """
        from core_plugin.adapters import files

        method: type[BasePeft] = cls(files.method_name(directory)).resolve()
        files.attach_saved(
            model, directory, method, name, trainable=trainable, renames=renames or {}
        )
        return method


def adapter_layer() -> type[AdapterLayer]:  # type: ignore[empty-body]
    """The class of a method's layer for a type of base layer that the method does not know."""


class AdapterLayerPlugin(BasePlugin, contract=adapter_layer):
    """The type of layers for a method of another package: functions ``() -> class``.

    The name is the method's and the base layer's type: ``lora.acme.quantized.QuantLinear``. It is
    loaded when a model has such a layer among the targets.
    """

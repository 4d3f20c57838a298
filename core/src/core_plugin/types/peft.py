"""Parameter-efficient fine-tuning methods."""

from __future__ import annotations

import dataclasses
import re
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from core_plugin.contract import Implementation
from core_plugin.errors import PluginContractError
from core_plugin.plugin import BasePlugin

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from core_plugin.adapters.layer import AdapterLayer

ADAPTER = "default"
"""The name of the adapter that a run trains."""


@dataclasses.dataclass(frozen=True)
class PeftParams:
    """The parameters that every method has; a method's own ``Params`` derives from it.

    A string is a regular expression for the whole path of a module; an entry of a list is a path,
    or the end of one after a dot: ``q_proj`` is ``layers.0.q_proj`` but not ``my_q_proj``.
    """

    target_modules: str | list[str] = "all-linear"
    """The layers that get an adapter. ``all-linear``: every linear one but the output head."""
    exclude_modules: str | list[str] | None = None
    """The layers that get none, whatever ``target_modules`` says."""

    def __post_init__(self) -> None:
        for field in ("target_modules", "exclude_modules"):
            _check_rule(field, getattr(self, field))


def _check_rule(field: str, rule: str | list[str] | None) -> None:
    if isinstance(rule, str):
        try:
            re.compile(rule)
        except re.error as error:
            raise ValueError(f"{field}: {rule!r} is not a regular expression: {error}") from None
    elif rule is not None:
        if not rule and field == "target_modules":
            raise ValueError(f"{field} is empty, so nothing would be trained")
        if any(not isinstance(entry, str) or not entry for entry in rule):
            raise ValueError(f"{field}: a list holds names of modules, got {rule!r}")
        if any(entry.lower() == "all-linear" for entry in rule):
            raise ValueError(f"{field}: all-linear stands alone and not in a list, got {rule!r}")


class BasePeft(Implementation, abstract=True):
    """A method: its parameters, its layer for each kind of base layer, its prefix, and whether
    its layers mix with another method's. Matching, replacing, freezing and files are the
    engine's (:mod:`core_plugin.adapters`).
    """  # noqa: D205

    Params: ClassVar[type] = PeftParams
    prefix: ClassVar[str]
    """What the names of the method's parameters begin with, such as ``lora_``: lower case, and
    its own.
    """
    training_only: ClassVar[frozenset[str]] = frozenset()
    """What of ``config`` may differ when an adapter is loaded, since it changes no result."""
    mixes: ClassVar[bool] = False
    """Whether a model may hold this method's layers and another's at once."""

    def __init_subclass__(cls, *, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(abstract=abstract, **kwargs)
        prefix = getattr(cls, "prefix", None)
        if not abstract and not re.fullmatch(r"[a-z][a-z0-9_]*_", str(prefix)):
            raise PluginContractError(
                f"{cls.__module__}.{cls.__qualname__}: prefix is lower-case letters, digits and "
                f"underscores, and ends with one, such as 'lora_'; got {prefix!r}"
            )

    @staticmethod
    @abstractmethod
    def layer(base: nn.Module, params: Any) -> type[AdapterLayer] | None:
        """The adapter layer class for a kind of base layer, or None if there is none.

        Raises:
            ConfigError: There is one, but not for this layer with these parameters, because ...
        """

    @staticmethod
    @abstractmethod
    def config(params: Any) -> Mapping[str, Any]:
        """The method's part of ``adapter_config.json``, in the words of the peft library.

        It holds ``peft_type`` and all that a result depends on besides the tensors. A file is
        loaded only if it says the same, ``training_only`` apart.
        """

    @classmethod
    def adapt(cls, model: nn.Module, params: Any) -> None:
        """Put an adapter into a model in place, and freeze all else. The model may be on ``meta``.

        Raises:
            ConfigError: Targets match nothing, or something that has no adapter layer; nothing
                was changed.
        """
        from core_plugin.adapters import inject

        inject(model, cls, params, ADAPTER)

    @staticmethod
    def base_name(name: str) -> str:
        """The name that a tensor of the model had before :meth:`adapt`."""
        from core_plugin.adapters import base_name

        return base_name(name)

    @classmethod
    def save(cls, directory: Path, params: Any, tensors: Mapping[str, Tensor]) -> None:
        """Write the adapter in the format of the peft library.

        Args:
            directory: Where to.
            params: The implementation's ``Params``.
            tensors: The trained parameters, whole, by their names in the model.
        """
        from core_plugin.adapters import save_adapter

        save_adapter(directory, cls, params, tensors, ADAPTER, None)


class PeftPlugin(BasePlugin, contract=BasePeft):
    """The type of PEFT methods."""

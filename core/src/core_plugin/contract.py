"""What a plugin type asks of its implementations, and the check that one fulfils it.

A type is of the *class form* (its contract is an abstract base; an implementation is a class whose
methods are static or class methods, and that is never instantiated) or of the *function form*
(its contract is a function; an implementation can be called in the same way).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from core_plugin.errors import PluginContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True)
class NoParams:
    """No parameters."""


class Implementation:
    """The base of every class-form contract.

    A subclass that lacks a method fails when it is defined. A base that leaves some methods to
    its own subclasses says so: ``class Partial(BaseX, abstract=True)``.
    """

    Params: ClassVar[type] = NoParams
    """The dataclass of the implementation's parameters."""

    def __init_subclass__(cls, *, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not abstract:
            ensure_methods_implemented(cls)


def ensure_methods_implemented(cls: type) -> None:
    """Check that a class has every abstract method of its bases.

    Raises:
        PluginContractError: With the names of the missing ones.
    """
    missing = sorted(
        {
            name
            for base in cls.__mro__
            for name, value in vars(base).items()
            if _is_abstract(value) and _is_abstract(inspect.getattr_static(cls, name))
        }
    )
    if missing:
        raise PluginContractError(
            f"{cls.__module__}.{cls.__qualname__} does not implement all required methods: "
            f"{', '.join(missing)}"
        )


def _is_abstract(value: object) -> bool:
    return getattr(value, "__isabstractmethod__", False) is True


def faults(implementation: Any, contract: type | Callable[..., Any] | None) -> list[str]:
    """What keeps an object from fulfilling a contract; empty if nothing does.

    A type without a contract takes any class or function.
    """
    if contract is None:
        found = [] if callable(implementation) else [f"is {_kind(implementation)}"]
    elif inspect.isclass(contract):
        found = list(_class_faults(implementation, contract))
    else:
        found = list(_function_faults(implementation, contract))
    return found or list(_params_faults(implementation))


def params_of(implementation: Any) -> type:
    """The dataclass of an implementation's parameters.

    A class has it as its ``Params``; of a function it is the annotation of the argument called
    ``params``; none, ``Any`` and ``object`` say that there are no parameters.
    """
    if inspect.isclass(implementation):
        return getattr(implementation, "Params", NoParams)
    parameter = _parameters(implementation).get("params")
    if parameter is None or parameter.annotation is inspect.Parameter.empty:
        return NoParams
    annotation = parameter.annotation
    if isinstance(annotation, str):
        scope = _globals(implementation)
        annotation = get_type_hints(_Annotated(annotation), globalns=scope)["params"]
    return NoParams if annotation in (Any, object) else annotation


class _Annotated:
    """Carries one annotation to ``get_type_hints``, so that the others need not be importable."""

    def __init__(self, annotation: str) -> None:
        self.__annotations__ = {"params": annotation}


def _globals(function: Any) -> dict[str, Any]:
    """The names that a callable's annotations were written with."""
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(inspect.unwrap(function), "__globals__"):
        function = type(function).__call__
    return getattr(inspect.unwrap(function), "__globals__", {})


def contract_methods(contract: type) -> Iterator[str]:
    """The names of the methods that a class-form contract has."""
    for name in dir(contract):
        static = inspect.getattr_static(contract, name)
        if not name.startswith("_") and isinstance(static, staticmethod | classmethod):
            yield name


def _class_faults(implementation: object, contract: type) -> Iterator[str]:
    if not inspect.isclass(implementation):
        yield f"is {_kind(implementation)}, where a class is needed (see {contract.__name__})"
        return
    for name in contract_methods(contract):
        if fault := _method_fault(implementation, name, contract):
            yield fault
    for name in _contract_attributes(contract):
        if fault := _attribute_fault(implementation, name, contract):
            yield fault


def _method_fault(implementation: type, name: str, contract: type) -> str | None:
    missing = f"lacks the method {name}{inspect.signature(getattr(contract, name))}"
    try:
        static = inspect.getattr_static(implementation, name)
    except AttributeError:
        return missing
    if inspect.isfunction(static):
        return f"{name} is an instance method; make it a static or class method"
    if not isinstance(static, staticmethod | classmethod):
        return f"{name} is {_kind(static)}, where a static or class method is needed"
    if _is_abstract(static):
        return missing
    fault = _signature_fault(getattr(implementation, name), getattr(contract, name))
    return fault and f"{name}{fault}"


def _contract_attributes(contract: type) -> list[str]:
    """The names of the annotated class attributes, ``Params`` apart, which need not be there."""
    names = {name for base in contract.__mro__ for name in inspect.get_annotations(base)}
    return sorted(name for name in names if not name.startswith("_") and name != "Params")


def _attribute_fault(implementation: type, name: str, contract: type) -> str | None:
    if not hasattr(implementation, name):
        return f"lacks the attribute {name}"
    value, default = getattr(implementation, name), getattr(contract, name, None)
    if default is not None and not isinstance(value, type(default)):
        return f"{name} is {_kind(value)}, where {_kind(default)} is needed"
    return None


def _function_faults(implementation: object, contract: Callable[..., Any]) -> Iterator[str]:
    if inspect.isclass(implementation) or not callable(implementation):
        yield f"is {_kind(implementation)}, where a function is needed"
    elif fault := _signature_fault(implementation, contract):
        yield f"its signature {fault}"
    elif "params" in _parameters(contract) and "params" not in _parameters(implementation):
        yield "the argument that gets the parameters is not called params"


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some callables of extension modules have none
        return {}


def _signature_fault(actual: Callable[..., Any], expected: Callable[..., Any]) -> str | None:
    """Why ``actual`` cannot be called wherever ``expected`` can, or None."""
    try:
        signature = inspect.signature(actual)
    except (TypeError, ValueError):
        return None
    wanted = inspect.signature(expected)
    everything = list(wanted.parameters.values())
    for arguments in (everything, [p for p in everything if p.default is p.empty]):
        positional = [p.name for p in arguments if p.kind is p.POSITIONAL_OR_KEYWORD]
        named = {p.name: p.name for p in arguments if p.kind is p.KEYWORD_ONLY}
        try:
            bound = signature.bind(*positional, **named)
        except TypeError as error:
            return f"{signature} cannot be called as {_plain(wanted)}: {error}"
        moved = [n for n in positional if bound.arguments.get(n, n) != n]
        if moved:
            return f"{signature} takes {', '.join(moved)} in another order than {_plain(wanted)}"
    return None


def _plain(signature: inspect.Signature) -> str:
    parameters = [
        p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()
    ]
    return str(inspect.Signature(parameters))


def _params_faults(implementation: Any) -> Iterator[str]:
    try:
        params = params_of(implementation)
    except Exception as error:  # an annotation is an expression of the plugin's
        yield f"the annotation of its params cannot be evaluated: {error}"
        return
    if not inspect.isclass(params) or not dataclasses.is_dataclass(params):
        yield f"its Params is {_kind(params)}, where a dataclass is needed"
    elif "name" in {field.name for field in dataclasses.fields(params)}:
        yield "its Params has a field called name, which is the plugin's own name in the YAML"


def _kind(value: object) -> str:
    if inspect.isclass(value):
        return f"the class {value.__qualname__}"
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__qualname__', value)}"
    return f"an object of type {type(value).__qualname__}"

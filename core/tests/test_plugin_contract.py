"""The contract of a type: checked when a class is defined, and when a plugin is resolved."""

import functools
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from core_plugin.contract import Implementation, NoParams, ensure_methods_implemented
from core_plugin.errors import PluginContractError
from core_plugin.plugin import BasePlugin

pytestmark = pytest.mark.torchfree


class BaseStore(Implementation, abstract=True):
    limit: ClassVar[int] = 1
    label: ClassVar[str]

    @staticmethod
    @abstractmethod
    def put(item, shelf, *, quiet): ...

    @classmethod
    @abstractmethod
    def get(cls, item, default=None): ...

    @staticmethod
    def optional(): ...


def sampler(data, params, *, steps): ...


def methods(**changes: Any) -> dict[str, Any]:
    return {
        "label": "store",
        "limit": 2,
        "put": staticmethod(lambda item, shelf, *, quiet: None),
        "get": classmethod(lambda cls, item, default=None: item),
        "optional": staticmethod(lambda: None),
    } | changes


def store(**changes: Any) -> type:
    """A class that derives from nothing, so that only resolving checks it."""
    given = methods(**changes)
    return type("Store", (), {name: value for name, value in given.items() if value is not ...})


def resolve(contract: Any, implementation: Any) -> Any:
    class TypePlugin(BasePlugin, contract=contract): ...

    TypePlugin("x").register()(implementation)
    return TypePlugin("x").resolve()


def test_a_class_with_the_methods_fulfils_the_contract_whatever_it_derives_from() -> None:
    implementation = store()
    assert resolve(BaseStore, implementation) is implementation


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"put": ...}, r"lacks the method put\(item, shelf, \*, quiet\)"),
        ({"optional": ...}, r"lacks the method optional\(\)"),
        ({"label": ...}, "lacks the attribute label"),
        ({"limit": "much"}, "limit is an object of type str, where an object of type int"),
        (
            {"put": lambda item, shelf, *, quiet: None},
            "put is an instance method; make it a static",
        ),
        ({"put": 5}, "put is an object of type int, where a static or class method is needed"),
        ({"put": property(lambda self: 5)}, "put is an object of type property, where a static"),
        ({"put": staticmethod(lambda item, *, quiet: 0)}, "put.*cannot be called as.*too many"),
        ({"put": staticmethod(lambda item, shelf: 0)}, "put.*unexpected keyword argument 'quiet'"),
        (
            {"put": staticmethod(lambda item, shelf, x, *, quiet: 0)},
            "put.*missing a required arg.*x",
        ),
        ({"put": staticmethod(lambda item, shelf, *, quiet, x: 0)}, "put.*missing a required.*x"),
        (
            {"put": staticmethod(lambda shelf, item, *, quiet: 0)},
            "put.*takes item, shelf in another",
        ),
        ({"get": classmethod(lambda cls, item, default: 0)}, "get.*missing a required.*default"),
        ({"Params": dict}, "its Params is the class dict, where a dataclass is needed"),
        ({"Params": NoParams()}, "its Params is an object of type NoParams"),
    ],
)
def test_what_a_class_lacks_is_said_when_it_is_resolved(changes, fault) -> None:
    with pytest.raises(PluginContractError, match=fault) as raised:
        resolve(BaseStore, store(**changes))
    assert "TypePlugin('x') (" in str(raised.value)
    assert ":Store" in str(raised.value)


def test_all_faults_of_a_class_are_told_at_once() -> None:
    with pytest.raises(PluginContractError) as raised:
        resolve(BaseStore, store(put=..., get=5, label=...))
    assert str(raised.value).count("\n  - ") == 3


@pytest.mark.parametrize(
    "put",
    [
        lambda item, shelf, *, quiet: None,
        lambda thing, place, *, quiet: None,
        lambda item, shelf, more=1, *, quiet=True, loud=False: None,
        lambda *arguments, **named: None,
    ],
)
def test_a_signature_that_can_be_called_in_the_same_way_is_enough(put) -> None:
    assert resolve(BaseStore, store(put=staticmethod(put)))


@pytest.mark.parametrize(
    ("implementation", "fault"),
    [
        (store(), "is the class Store, where a function is needed"),
        (lambda data, *, steps: None, "cannot be called as"),
        (lambda data, params: None, "unexpected keyword argument 'steps'"),
        (lambda params, data, *, steps: None, "in another order"),
        (lambda data, options, *, steps: None, "is not called params"),
    ],
)
def test_what_a_function_lacks_is_said(implementation, fault) -> None:
    with pytest.raises(PluginContractError, match=fault):
        resolve(sampler, implementation)


def test_a_function_is_no_class() -> None:
    with pytest.raises(PluginContractError, match=r"is the function .*, where a class is needed"):
        resolve(BaseStore, sampler)


@dataclass(frozen=True)
class Params:
    size: int = 1


def annotated(data, params: Params, *, steps): ...


def quoted(data: "NotImportable", params: "Params", *, steps): ...  # noqa: F821


class Callable_:
    def __call__(self, data, params: "Params", *, steps): ...


@functools.wraps(quoted)
def wrapped(*arguments, **named): ...


@pytest.mark.parametrize(
    "function",
    [annotated, quoted, Callable_(), wrapped, functools.partial(quoted, steps=1)],
)
def test_a_function_declares_its_params_by_its_annotation(function) -> None:
    class TypePlugin(BasePlugin, contract=sampler): ...

    TypePlugin("x").register()(function)
    assert TypePlugin("x").params_type() is Params


def test_without_params_there_are_none() -> None:
    class TypePlugin(BasePlugin): ...

    TypePlugin("class").register()(store())
    TypePlugin("function").register()(lambda data, params: None)
    TypePlugin("extension").register()(max)
    assert TypePlugin("class").params_type() is NoParams
    assert TypePlugin("function").params_type() is NoParams
    assert TypePlugin("extension").params_type() is NoParams


def unknown_annotation(data, params: "NoSuchName", *, steps): ...  # noqa: F821


def integer_params(data, params: int, *, steps): ...


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (unknown_annotation, "annotation of its params cannot be evaluated: .*NoSuchName"),
        (integer_params, "its Params is the class int, where a dataclass is needed"),
    ],
)
def test_params_that_are_no_dataclass_are_refused(function, fault) -> None:
    with pytest.raises(PluginContractError, match=fault):
        resolve(sampler, function)


def test_params_cannot_have_the_plugins_own_key() -> None:
    @dataclass
    class Named:
        name: str = "x"

    with pytest.raises(PluginContractError, match="a field called name"):
        resolve(BaseStore, store(Params=Named))


def test_a_subclass_that_lacks_methods_fails_when_it_is_defined() -> None:
    with pytest.raises(
        PluginContractError, match=r"test_plugin_contract\..*Half does not .*: get, put$"
    ):

        class Half(BaseStore): ...

    class Whole(BaseStore):
        @staticmethod
        def put(item, shelf, *, quiet): ...

        @classmethod
        def get(cls, item, default=None): ...

    assert issubclass(Whole, BaseStore)


def test_an_intermediate_base_may_leave_methods_to_its_subclasses() -> None:
    class Partial(BaseStore, abstract=True):
        @staticmethod
        def put(item, shelf, *, quiet): ...

    with pytest.raises(PluginContractError, match=r"Third does not .*: get$"):

        class Third(Partial): ...

    class Rest:
        @classmethod
        def get(cls, item, default=None): ...

    class Fourth(Rest, Partial):
        label = "fourth"

    assert resolve(BaseStore, Fourth) is Fourth
    with pytest.raises(PluginContractError, match=r"lacks the method get\("):
        resolve(BaseStore, type("Fifth", (Partial,), {"label": "fifth"}, abstract=True))


def test_any_class_can_be_checked_for_abstract_methods() -> None:
    class Plain:
        @abstractmethod
        def method(self): ...

    class Derived(Plain):
        method = None

    with pytest.raises(PluginContractError, match=r"Plain does not implement .*: method"):
        ensure_methods_implemented(Plain)
    ensure_methods_implemented(Derived)

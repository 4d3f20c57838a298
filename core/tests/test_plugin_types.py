"""Plugin types: their names, their registries, what may be registered."""

import sys

import pytest

from core_plugin.plugin import BasePlugin

pytestmark = pytest.mark.torchfree


def implementation(data, params):
    return data


def test_types_share_no_names() -> None:
    class FirstPlugin(BasePlugin): ...

    class SecondPlugin(BasePlugin): ...

    FirstPlugin("same").register()(implementation)
    SecondPlugin("same").register()(len)
    assert FirstPlugin("same").resolve() is implementation
    assert SecondPlugin("same").resolve() is len


def test_a_type_derived_from_another_has_names_and_a_group_of_its_own(environment) -> None:
    class ParentPlugin(BasePlugin, contract=implementation): ...

    class ChildPlugin(ParentPlugin): ...

    ParentPlugin("parent").register()(implementation)
    ChildPlugin("child").register()(implementation)
    environment.site().add("acme", parent="of_parent = a:b", child="of_child = a:b")
    assert ParentPlugin.names() == ["of_parent", "parent"]
    assert ChildPlugin.names() == ["child", "of_child"]
    assert (ParentPlugin.group(), ChildPlugin.group()) == (
        "core_plugin.parent",
        "core_plugin.child",
    )
    assert ChildPlugin.contract is ParentPlugin.contract


@pytest.mark.parametrize(
    ("class_name", "type_name"),
    [("SamplerPlugin", "sampler"), ("TokenSamplerPlugin", "token_sampler"), ("Sampler", "sampler")],
)
def test_the_name_of_a_type_is_that_of_its_class(class_name: str, type_name: str) -> None:
    plugin_type = type(class_name, (BasePlugin,), {})
    assert plugin_type.type_name == type_name
    assert type(class_name, (BasePlugin,), {}, type_name="other").group() == "core_plugin.other"


@pytest.mark.parametrize("class_name", ["Plugin", "_HiddenPlugin", "Säge"])
def test_a_type_needs_a_name_that_a_group_can_have(class_name: str) -> None:
    with pytest.raises(TypeError, match="cannot be the name of a plugin type"):
        type(class_name, (BasePlugin,), {})


class SamplerPlugin(BasePlugin): ...


@pytest.mark.parametrize("arguments", [(), ("",), (" ",), (None,), (3,), (["a"],)])
def test_a_route_needs_a_name(arguments) -> None:
    with pytest.raises(TypeError, match=r"SamplerPlugin needs a plugin's name, .*\('example'\)"):
        SamplerPlugin(*arguments)


def test_the_base_is_no_type() -> None:
    with pytest.raises(TypeError, match="BasePlugin is no plugin type"):
        BasePlugin("x")


@pytest.mark.parametrize("thing", [42, "text", None, [len]])
def test_only_classes_and_callables_are_registered(thing: object) -> None:
    class TypePlugin(BasePlugin): ...

    with pytest.raises(TypeError, match=r"TypePlugin\('x'\).*neither a class nor a callable"):
        TypePlugin("x").register()(thing)
    assert TypePlugin.names() == []


def test_registering_returns_the_object_unchanged() -> None:
    class TypePlugin(BasePlugin): ...

    assert TypePlugin("x").register()(implementation) is implementation


def test_a_qualified_name_cannot_be_registered() -> None:
    with pytest.raises(ValueError, match="without ':'"):
        SamplerPlugin("acme:x").register()(implementation)


@pytest.mark.parametrize("target", ["module", "module:", ":object", ""])
def test_a_lazy_registration_needs_an_object_reference(target: str) -> None:
    with pytest.raises(TypeError, match=r"package\.module:object"):
        SamplerPlugin.register_lazy("x", target)


def test_a_lazy_registration_imports_when_it_is_resolved(environment) -> None:
    class TypePlugin(BasePlugin): ...

    environment.site().add("z", modules={"lazily.py": "class Outer:\n    def inner(): return 7"})
    TypePlugin.register_lazy("x", "lazily:Outer.inner")
    assert TypePlugin.names() == ["x"]
    assert "lazily" not in sys.modules
    assert TypePlugin("x")() == 7


def test_names_are_sorted_and_import_nothing(environment) -> None:
    class TypePlugin(BasePlugin, type_name="named"): ...

    module = {"exploding.py": "raise SystemExit('imported')"}
    environment.site().add("acme", named="b = exploding:b\na = exploding:a", modules=module)
    TypePlugin("c").register()(implementation)
    TypePlugin("a").register(override=True)(implementation)
    assert TypePlugin.names() == ["a", "b", "c"]


def test_a_second_registration_warns_with_both_origins_and_is_used() -> None:
    class TypePlugin(BasePlugin): ...

    def first(): ...

    def second(): ...

    TypePlugin("x").register()(first)
    with pytest.warns(UserWarning, match=r"first \(.*:\d+\) .* replaced by .*second \(") as warned:
        TypePlugin("x").register()(second)
    assert warned[0].filename == __file__
    assert TypePlugin("x").resolve() is second
    TypePlugin("x").register(override=True)(first)
    assert TypePlugin("x").resolve() is first


def test_a_lazy_registration_warns_where_it_stands() -> None:
    class TypePlugin(BasePlugin): ...

    TypePlugin.register_lazy("x", "a:b")
    with pytest.warns(UserWarning, match=r"a:b \(registered lazily\) .* c:d") as warned:
        TypePlugin.register_lazy("x", "c:d")
    assert warned[0].filename == __file__

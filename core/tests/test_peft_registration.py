"""Registering PEFT methods: names, prefixes, and layers that other packages bring."""

import pytest

from core_plugin.errors import PluginConflictError, PluginContractError
from core_plugin.types.peft import AdapterLayerPlugin, BasePeft, PeftPlugin

pytestmark = pytest.mark.torchfree


def method(name: str, prefix: str) -> type[BasePeft]:
    return type(name.title(), (BasePeft,), {"peft_type": name.upper(), "prefix": prefix})


@pytest.mark.parametrize("name", ["Gate", "gate-x", "1gate", "gate.x"])
def test_a_name_is_lower_case(name: str) -> None:
    with pytest.raises(PluginContractError, match=rf"{name!r} \(.*Gate.*lower-case letters"):
        PeftPlugin(name).register()(method("gate", "gate_"))


def test_the_type_in_files_is_the_name() -> None:
    with pytest.raises(PluginContractError, match="peft_type is 'DOOR', and has to be 'GATE'"):
        PeftPlugin("gate").register()(method("door", "door_"))


def test_a_prefix_belongs_to_one_method_and_both_are_named() -> None:
    PeftPlugin("first_of_two").register()(method("first_of_two", "oftwo_"))
    with pytest.raises(PluginConflictError) as caught:
        PeftPlugin("second_of_two").register()(method("second_of_two", "oftwo_"))
    told = str(caught.value)
    assert "'first_of_two' (" in told
    assert ":First_Of_Two" in told
    assert "'second_of_two' (" in told
    assert "the prefix 'oftwo_'" in told
    assert "second_of_two" not in PeftPlugin.names()


METHOD = """
from core_plugin.types import BasePeft

class Method(BasePeft):
    peft_type = "{type}"
    prefix = "{prefix}"
"""


def install(environment, distribution: str, name: str, prefix: str) -> None:
    module = distribution.replace("-", "_")
    text = METHOD.format(type=name.upper(), prefix=prefix)
    environment.site(distribution).add(
        distribution, peft=f"{name} = {module}:Method", modules={f"{module}.py": text}
    )


def test_two_distributions_with_one_prefix_are_both_named(environment) -> None:
    install(environment, "acme-gate", "acme_gate", "shared_")
    install(environment, "other-gate", "other_gate", "shared_")
    PeftPlugin("acme_gate").resolve()
    with pytest.raises(PluginConflictError) as caught:
        PeftPlugin("other_gate").resolve()
    assert "acme-gate 1.0" in str(caught.value)
    assert "other-gate 1.0" in str(caught.value)


def test_an_installed_name_in_upper_case_names_its_distribution(environment) -> None:
    install(environment, "loud-gate", "LOUD", "loud_")
    with pytest.raises(PluginContractError, match=r"'LOUD' \(.*loud-gate 1.0.*lower-case"):
        PeftPlugin("LOUD").resolve()


def test_a_layer_is_found_by_the_method_and_the_full_name_of_a_type() -> None:
    class Kind: ...

    class Special(Kind): ...

    class Layer: ...

    def brought():
        return Layer

    gate = method("gate_with_layers", "gwl_")
    assert gate.layer_class(Special) is None
    AdapterLayerPlugin(f"gate_with_layers.{__name__}.{Kind.__qualname__}").register()(brought)
    assert gate.layer_class(Special) is Layer
    assert method("another_gate", "another_").layer_class(Special) is None


def test_a_broken_layer_of_another_package_is_loaded_only_if_it_is_needed(environment) -> None:
    environment.site().add("acme-layers", adapter_layer="gate.acme.Layer = nowhere:layer")
    assert method("gate", "gate_").layer_class(int) is None

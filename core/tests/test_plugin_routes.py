"""Routes: a name of a type, and nothing else."""

import copy
import functools
import pickle
from abc import abstractmethod
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from core_plugin.contract import Implementation, NoParams
from core_plugin.errors import PluginContractError, PluginNotFoundError
from core_plugin.plugin import BasePlugin
from core_plugin.types import OptimizerPlugin, SchedulerPlugin

pytestmark = pytest.mark.torchfree


class BaseStore(Implementation, abstract=True):
    @staticmethod
    @abstractmethod
    def put(item): ...

    @staticmethod
    def get(item):
        return item


class StorePlugin(BasePlugin, contract=BaseStore): ...


class SamplerPlugin(BasePlugin, contract=lambda data, params: None): ...


@StorePlugin("disk").register()
class Disk(BaseStore):
    size = 7

    @staticmethod
    def put(item):
        return [item]


@SamplerPlugin("uniform").register()
def uniform(data, params):
    return data, params


def test_a_route_is_its_type_and_its_name() -> None:
    route = OptimizerPlugin("adamw")
    assert repr(route) == "OptimizerPlugin('adamw')"
    assert route == OptimizerPlugin("adamw")
    assert route != OptimizerPlugin("sgd")
    assert route != SchedulerPlugin("adamw")
    assert route != "adamw"
    assert len({route, OptimizerPlugin("adamw"), SchedulerPlugin("adamw")}) == 2


@pytest.mark.parametrize("name", ["adamw", "no-such-plugin"])
@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy]
    + [
        functools.partial(lambda protocol, r: pickle.loads(pickle.dumps(r, protocol)), protocol)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    ],
)
def test_a_route_can_be_copied_and_pickled_whether_or_not_it_can_be_resolved(copied, name) -> None:
    route = OptimizerPlugin(name)
    assert copied(route) == route


def test_a_spawned_process_resolves_a_route_by_its_entry_point(environment) -> None:
    module = {
        "acme_spawned.py": "import os\ndef optimizer(model, params): return model, os.getpid()"
    }
    environment.site().add("acme", optimizer="acme = acme_spawned:optimizer", modules=module)
    route = OptimizerPlugin("acme")
    _, here = route("model", None)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        model, there = pool.submit(route, "model", None).result()
    assert model == "model"
    assert there != here


def test_a_route_holds_a_name_alone() -> None:
    with pytest.raises(AttributeError, match=r"OptimizerPlugin\('adamw'\).*cannot set lr"):
        OptimizerPlugin("adamw").lr = 1


def test_methods_and_calls_reach_the_implementation() -> None:
    assert StorePlugin("disk").put(3) == [3]
    assert StorePlugin("disk").get(3) == 3
    assert StorePlugin("disk").size == 7
    assert StorePlugin("disk").resolve() is Disk
    assert SamplerPlugin("uniform")(1, params=2) == (1, 2)


@pytest.mark.parametrize(
    "name", ["__len__", "__array__", "__wrapped__", "_private", "__setstate__"]
)
def test_dunder_and_private_names_are_not_forwarded(name: str) -> None:
    class Everything(type):
        def __getattr__(cls, attribute):
            return attribute

    class TypePlugin(BasePlugin): ...

    TypePlugin("x").register()(Everything("Implementation", (), {"Params": NoParams}))
    assert TypePlugin("x").public == "public"
    with pytest.raises(AttributeError, match="does not forward"):
        getattr(TypePlugin("x"), name)
    assert not hasattr(TypePlugin("no-such-plugin"), name)


def test_a_missing_method_names_the_type_the_plugin_its_origin_and_what_there_is() -> None:
    with pytest.raises(
        AttributeError,
        match=r"StorePlugin\('disk'\) \(.*:Disk .*no 'puts'; it has .*get, put, size",
    ):
        StorePlugin("disk").puts(1)
    assert not hasattr(StorePlugin("disk"), "puts")


def test_a_missing_method_names_the_distribution(environment) -> None:
    site = environment.site()
    site.add("acme-store", "2.1", store="shelf = acme_shelf:Shelf")
    (site.path / "acme_shelf.py").write_text(
        "class Shelf:\n    put = get = staticmethod(lambda item: item)"
    )
    with pytest.raises(
        AttributeError,
        match=r"StorePlugin\('shelf'\) \(acme_shelf:Shelf of acme-store 2\.1 \(.*has get, put",
    ):
        StorePlugin("shelf").take()


def test_a_function_asked_for_a_method_says_that_it_is_called() -> None:
    with pytest.raises(
        AttributeError, match=r"SamplerPlugin\('uniform'\) .*is a function .*'draw'; call it"
    ):
        SamplerPlugin("uniform").draw()


def test_a_class_called_as_a_function_says_that_its_methods_are() -> None:
    with pytest.raises(PluginContractError, match=r"StorePlugin\('disk'\) .*is a class.*get, put"):
        StorePlugin("disk")(1)


def test_asking_an_unknown_plugin_for_something_says_that_it_is_unknown() -> None:
    with pytest.raises(PluginNotFoundError, match="no StorePlugin is called 'dusk'"):
        StorePlugin("dusk").put(1)
    with pytest.raises(PluginNotFoundError):
        StorePlugin("dusk")(1)

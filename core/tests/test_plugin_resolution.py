"""Resolving a route: what is chosen among the installed plugins, and what broken ones do."""

import sys
import threading
import traceback

import pytest

from core_plugin.errors import (
    PluginConflictError,
    PluginContractError,
    PluginIncompatibleError,
    PluginLoadError,
    PluginNotFoundError,
)
from core_plugin.plugin import BasePlugin
from core_plugin.types import OptimizerPlugin

pytestmark = pytest.mark.torchfree


def sampler(data, params): ...


@pytest.fixture
def plugin_type() -> type[BasePlugin]:
    """A type of this test alone; its group is core_plugin.sampler."""

    class SamplerPlugin(BasePlugin, contract=sampler): ...

    return SamplerPlugin


FUNCTION = "def sample(data, params):\n    return __name__\n"

BROKEN = {
    "missing_import": ("import no_such_module", "ModuleNotFoundError: .*no_such_module"),
    "syntax": ("def f(:", "SyntaxError"),
    "exits": ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
    "native": ("import ctypes; ctypes.CDLL('libnone.so.9')", "OSError: libnone.so.9"),
    "raises": ("raise RuntimeError('no device')", "RuntimeError: no device"),
    "out_of_memory": ("raise MemoryError", "MemoryError"),
    "no_attribute": ("other = 1", "AttributeError: .*sample"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_says_why_each_time_and_leaves_the_others_usable(
    environment, plugin_type, kind
) -> None:
    code, cause = BROKEN[kind]
    counted = f"import builtins\nbuiltins.imports = getattr(builtins, 'imports', 0) + 1\n{code}"
    site = environment.site()
    site.add(
        "broken-dist",
        "3.2",
        sampler="broken = broken_module:sample\nfine = fine_module:sample",
        modules={"broken_module.py": counted, "fine_module.py": FUNCTION},
    )
    import builtins

    builtins.imports = 0
    errors = []
    for name in ("broken", "broken", "broken-dist:broken"):
        with pytest.raises(PluginLoadError, match=cause) as raised:
            plugin_type(name).resolve()
        errors.append(raised.value)
    assert builtins.imports in (0, 1)  # 0 where it is no Python
    assert "SamplerPlugin('broken') (broken_module:sample of broken-dist 3.2 (" in str(errors[0])
    assert errors[0] is not errors[1]
    assert errors[0].__cause__ is not None
    assert errors[0].__cause__ is errors[1].__cause__ is errors[2].__cause__
    assert "broken_module" in "".join(traceback.format_exception(errors[1]))
    assert plugin_type("fine")(1, 2) == "fine_module"


def test_an_interrupt_while_importing_stays_one(environment, plugin_type) -> None:
    module = {"interrupted.py": "raise KeyboardInterrupt"}
    environment.site().add("acme", sampler="x = interrupted:x", modules=module)
    with pytest.raises(KeyboardInterrupt):
        plugin_type("x").resolve()


def test_an_object_that_fails_the_contract_fails_each_time(environment, plugin_type) -> None:
    modules = {"wrong.py": "def sample(): ..."}
    environment.site().add("acme", sampler="x = wrong:sample", modules=modules)
    for _ in range(2):
        with pytest.raises(PluginContractError, match=r"wrong:sample of acme 1\.0 ") as raised:
            plugin_type("x").resolve()
        assert "cannot be called as (data, params)" in str(raised.value)


@pytest.mark.parametrize("ending", ["", "raise RuntimeError('late')"])
def test_threads_that_resolve_one_plugin_import_it_once(environment, plugin_type, ending) -> None:
    module = f"import sys, time\nsys.imported_here.append(1)\ntime.sleep(0.05)\n{FUNCTION}{ending}"
    environment.site().add("acme", sampler="x = slow:sample", modules={"slow.py": module})
    sys.imported_here = []
    outcomes = []
    start = threading.Barrier(4)

    def resolve(name: str) -> None:
        start.wait()
        try:
            outcomes.append(plugin_type(name).resolve())
        except PluginLoadError as error:
            outcomes.append(error.__cause__)

    threads = [threading.Thread(target=resolve, args=(n,)) for n in ("x", "x", "acme:x", "x")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.imported_here == [1]
    assert len(outcomes) == 4
    assert len(set(outcomes)) == 1
    assert isinstance(outcomes[0], RuntimeError) == bool(ending)


def test_importing_a_module_that_registers_does_not_wait_for_who_resolves_it(
    environment, plugin_type
) -> None:
    # One thread resolves, and so waits for the import that another one is in the middle of.
    module = (
        "import sys, time\nsys.importing.set()\nsys.resolving.wait(5)\ntime.sleep(0.05)\n"
        "@sys.plugin_type('x').register()\n" + FUNCTION
    )
    environment.site().add(
        "acme", sampler="x = registering:sample", modules={"registering.py": module}
    )
    sys.plugin_type, sys.importing, sys.resolving = (
        plugin_type,
        threading.Event(),
        threading.Event(),
    )
    importer = threading.Thread(target=__import__, args=("registering",), daemon=True)
    importer.start()
    sys.importing.wait(5)
    resolver = threading.Thread(
        target=lambda: (sys.resolving.set(), plugin_type("x").resolve()), daemon=True
    )
    resolver.start()
    importer.join(5)
    resolver.join(5)
    assert not importer.is_alive()
    assert not resolver.is_alive()


def conflict(environment) -> None:
    site, other = environment.site("one"), environment.site("two")
    site.add("acme", "1.0", sampler="x = of_acme:sample", modules={"of_acme.py": FUNCTION})
    other.add("Zeta.Dist", "2.0", sampler="x = of_zeta:sample", modules={"of_zeta.py": FUNCTION})


def test_two_distributions_with_one_name_conflict_and_the_name_can_choose(
    environment, plugin_type
) -> None:
    conflict(environment)
    with pytest.raises(PluginConflictError) as raised:
        plugin_type("x").resolve()
    message = str(raised.value)
    assert "name: acme:x    is of_acme:sample of acme 1.0 (" in message
    assert "name: zeta-dist:x    is of_zeta:sample of zeta-dist 2.0 (" in message
    assert str(environment.root / "one") in message
    assert str(environment.root / "two") in message
    assert "of_acme" not in sys.modules
    assert plugin_type("acme:x")(0, 0) == "of_acme"
    assert plugin_type("zeta-dist:x")(0, 0) == "of_zeta"
    assert plugin_type("Zeta_Dist:x")(0, 0) == "of_zeta"
    with pytest.raises(PluginConflictError):
        plugin_type("x").resolve()


def test_a_name_resolves_to_the_same_whatever_was_imported_before(environment, plugin_type) -> None:
    conflict(environment)
    # Both modules also register themselves, as importing either would.
    for module in ("of_acme", "of_zeta"):
        function = __import__(module).sample
        plugin_type("x").register(override=True)(function)
        with pytest.raises(PluginConflictError):
            plugin_type("x").resolve()


def test_a_built_in_keeps_its_name(environment) -> None:
    code = "def adamw(model, params):\n    return 'mine'\n"
    environment.site().add("acme", optimizer="adamw = of_acme:adamw", modules={"of_acme.py": code})
    built_in = OptimizerPlugin("adamw")
    assert built_in.registration().distribution.name == "core-plugin"
    assert built_in.resolve() is OptimizerPlugin("core-plugin:adamw").resolve()
    assert "of_acme" not in sys.modules
    assert OptimizerPlugin("acme:adamw")(1, 2) == "mine"


def test_a_registration_in_the_process_replaces_an_installed_plugin_and_warns_once(
    environment, plugin_type
) -> None:
    modules = {"of_acme.py": FUNCTION}
    environment.site().add("acme", sampler="x = of_acme:sample", modules=modules)

    @plugin_type("x").register()
    def mine(data, params): ...

    with pytest.warns(
        UserWarning, match=r"mine \(.*:\d+\) is used in place of of_acme:sample of acme 1\.0"
    ) as warned:
        assert plugin_type("x").resolve() is mine
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert plugin_type("x").resolve() is mine
    assert "of_acme" not in sys.modules

    @plugin_type("x").register(override=True)
    def meant(data, params): ...

    assert plugin_type("x").resolve() is meant
    assert plugin_type("x").registration().distribution is None


def test_a_module_that_registers_its_own_entry_point_is_that_distributions(
    environment, plugin_type
) -> None:
    environment.site().add("acme", sampler="x = own:sample", modules={"own.py": FUNCTION})
    import own

    plugin_type("x").register()(own.sample)
    assert plugin_type("x").resolve() is own.sample
    assert plugin_type("x").registration().distribution.name == "acme"


@pytest.mark.parametrize(
    ("requires", "fault"),
    [
        ("core-plugin<0.1", "requires core-plugin<0.1, but core-plugin 0.1.0 is installed"),
        ("Core_Plugin>=99", "requires Core_Plugin>=99, but core-plugin 0.1.0"),
        ("torch<1", "requires torch<1"),
        ("torch>=99; python_version>'3'", "requires torch>=99"),
    ],
)
def test_declared_requirements_are_checked_before_the_import(
    environment, plugin_type, requires, fault
) -> None:
    environment.site().add(
        "acme",
        sampler="x = demanding:sample",
        requires=(requires,),
        modules={"demanding.py": FUNCTION},
    )
    with pytest.raises(PluginIncompatibleError, match=fault) as raised:
        plugin_type("x").resolve()
    assert "demanding:sample of acme 1.0" in str(raised.value)
    assert "demanding" not in sys.modules


@pytest.mark.parametrize(
    "requires",
    [
        "core-plugin",
        "core-plugin>=0.1,<0.2",
        "numpy>=999",
        "torch<1; extra == 'old'",
        "torch<1; python_version < '3'",
        "torch << 1",
        "torch<1; nonsense == 'x'",
    ],
)
def test_other_requirements_are_none_of_its_business(environment, plugin_type, requires) -> None:
    environment.site().add(
        "acme", sampler="x = content:sample", requires=(requires,), modules={"content.py": FUNCTION}
    )
    assert plugin_type("x")(0, 0) == "content"


def test_what_core_itself_requires_makes_no_built_in_incompatible(environment) -> None:
    info = environment.site().add(
        "core-plugin",
        requires=("torch>=999",),
        sampler="built_in = built_in_module:sample",
        modules={"built_in_module.py": FUNCTION},
    )

    class SamplerPlugin(BasePlugin, contract=sampler): ...

    assert SamplerPlugin("built_in")(0, 0) == "built_in_module"
    assert SamplerPlugin("built_in").registration().distribution.location == str(info)


def test_torch_may_be_absent_or_without_metadata(environment, plugin_type, monkeypatch) -> None:
    site = environment.site()
    site.add("acme", sampler="x = m:sample", requires=("torch>=2",), modules={"m.py": FUNCTION})
    environment.only(site.path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(PluginIncompatibleError, match="requires torch>=2, which is not installed"):
        plugin_type("x").resolve()
    (site.path / "torch.py").write_text("raise AssertionError('imported')")
    assert plugin_type("x")(0, 0) == "m"


def test_an_unknown_name_gets_near_names_what_is_installed_and_what_to_install(
    environment, plugin_type
) -> None:
    environment.site().add("acme", sampler="uniform = a:b\nnormal = a:c")
    with pytest.raises(PluginNotFoundError) as raised:
        plugin_type("unifrom").resolve()
    assert "no SamplerPlugin is called 'unifrom'" in str(raised.value)
    assert "did you mean uniform" in str(raised.value)
    assert "installed: normal, uniform" in str(raised.value)
    with pytest.raises(PluginNotFoundError, match="did you mean acme:normal"):
        plugin_type("acem:normal").resolve()
    with pytest.raises(PluginNotFoundError, match="installed: none"):
        type("EmptyPlugin", (BasePlugin,), {})("x").resolve()


def test_a_published_package_is_named_in_the_pip_line(environment) -> None:
    class MissingPlugin(BasePlugin, type_name="distributed"): ...

    environment.only(environment.root)
    with pytest.raises(PluginNotFoundError, match="pip install core-plugin-fsdp2"):
        MissingPlugin("fsdp2").resolve()


def test_a_plugin_that_only_a_shadowed_distribution_has_is_said_to_be_there(
    environment, plugin_type
) -> None:
    old = environment.site("old").add("acme", "1.0", sampler="x = a:b")
    new = environment.site("new").add("acme", "2.0", sampler="y = a:b")
    with pytest.raises(PluginNotFoundError) as raised:
        plugin_type("x").resolve()
    assert f"it is in acme 1.0 ({old}), which is shadowed by {new}" in str(raised.value)
    assert plugin_type.names() == ["y"]

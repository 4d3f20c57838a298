"""Which distributions may be used: the environment's lists and the run's."""

import sys

import pytest

from core_plugin import config, policy
from core_plugin.errors import ConfigError, PluginDisabledError
from core_plugin.plugin import BasePlugin
from core_plugin.policy import Policy
from core_plugin.types import OptimizerPlugin

pytestmark = pytest.mark.torchfree

MODULE = "def optimizer(model, params):\n    return __name__\n"


@pytest.fixture(autouse=True)
def _installed(environment):
    site = environment.site()
    for name, module, version in (("Acme_Dist", "of_acme", "1.5"), ("zeta", "of_zeta", "2.0")):
        site.add(
            name,
            version,
            optimizer=f"{module} = {module}:optimizer\nshared = {module}:optimizer",
            modules={f"{module}.py": MODULE},
        )


def denied(name: str) -> str | None:
    try:
        OptimizerPlugin(name).resolve()
    except PluginDisabledError as error:
        assert name not in sys.modules
        return str(error)
    return None


@pytest.mark.parametrize(
    ("entry", "is_named"),
    [
        ("acme-dist", True),
        ("ACME.dist", True),
        ("acme__dist", True),
        ("acme-dist>=1,<2", True),
        ("acme-dist == 1.5", True),
        ("acme-dist<1.5", False),
        ("acme-dist>1, <1.5", False),
        ("acme", False),
    ],
)
@pytest.mark.parametrize("variable", ["CORE_PLUGIN_ALLOW", "CORE_PLUGIN_DENY"])
def test_entries_are_names_as_pip_reads_them_with_versions(
    monkeypatch, variable, entry, is_named
) -> None:
    monkeypatch.setenv(variable, f" other , {entry},, third>=2")
    reason = denied("of_acme")
    assert (reason is None) == (is_named == (variable == "CORE_PLUGIN_ALLOW"))
    if reason:
        assert "of_acme:optimizer of acme-dist 1.5 (" in reason
        assert f": {variable} " in reason


def test_a_denial_wins_and_does_not_import(monkeypatch) -> None:
    monkeypatch.setenv("CORE_PLUGIN_ALLOW", "acme-dist,zeta")
    monkeypatch.setenv("CORE_PLUGIN_DENY", "zeta")
    assert denied("of_acme") is None
    assert "CORE_PLUGIN_DENY has zeta" in denied("of_zeta")


def test_an_empty_allow_list_leaves_the_built_ins(monkeypatch) -> None:
    monkeypatch.setenv("CORE_PLUGIN_ALLOW", "")
    assert "CORE_PLUGIN_ALLOW does not have it" in denied("of_acme")
    assert denied("adamw") is None
    monkeypatch.setenv("CORE_PLUGIN_DENY", "core-plugin")
    assert denied("adamw") is None


def test_the_runs_lists_and_the_environments_both_count(monkeypatch) -> None:
    monkeypatch.setenv("CORE_PLUGIN_ALLOW", "acme-dist")
    policy.use(Policy.of(["acme-dist>=2", "zeta"], []))
    assert "plugins.allow has acme-dist>=2, and this is 1.5" in denied("of_acme")
    assert "CORE_PLUGIN_ALLOW does not have it" in denied("of_zeta")


def test_a_denial_counts_for_what_was_resolved_before() -> None:
    assert denied("of_acme") is None
    policy.use(Policy.of(None, ["acme-dist"]))
    with pytest.raises(PluginDisabledError):
        OptimizerPlugin("of_acme").resolve()
    policy.use(Policy())
    assert denied("of_acme") is None


def test_a_conflict_is_settled_by_a_list(monkeypatch) -> None:
    monkeypatch.setenv("CORE_PLUGIN_DENY", "zeta")
    assert OptimizerPlugin("shared")(0, 0) == "of_acme"
    monkeypatch.setenv("CORE_PLUGIN_DENY", "acme-dist")
    assert OptimizerPlugin("shared")(0, 0) == "of_zeta"


@pytest.mark.parametrize(
    "entry", ["a b", ">=1", "acme[extra]", "acme; python_version>'3'", "a @ b:c"]
)
def test_an_entry_that_is_no_name_is_an_error(monkeypatch, entry) -> None:
    with pytest.raises(ConfigError, match=r"plugins\.deny: .* is not a distribution's name"):
        Policy.of(None, [entry])
    monkeypatch.setenv("CORE_PLUGIN_ALLOW", f"fine,{entry}")
    with pytest.raises(ConfigError, match=r"CORE_PLUGIN_ALLOW: .* is not a distribution's name"):
        OptimizerPlugin("of_acme").resolve()


def test_all_wrong_entries_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        Policy.of(["a b", "fine", "c d"], [])
    assert len(raised.value.faults) == 2


def test_an_entry_that_names_nothing_warns(monkeypatch) -> None:
    monkeypatch.setenv("CORE_PLUGIN_DENY", "amce-dist,zeta,numpy,core-plugin")
    with pytest.warns(UserWarning, match="CORE_PLUGIN_DENY has") as warned:
        policy.active().warn_of_unknown_names()
    assert [str(w.message).split("'")[1] for w in warned] == ["amce-dist", "numpy"]
    assert "acme-dist" in str(warned[0].message)


def test_listing_and_resolving_import_only_what_is_named() -> None:
    OptimizerPlugin.names()
    OptimizerPlugin("of_acme").resolve()
    assert "of_acme" in sys.modules
    assert "of_zeta" not in sys.modules


RUN = {"hooks": [], "data": {"name": "text", "path": "x"}, "train": {"steps": 1}}


def test_the_lists_of_a_run_keep_its_plugins_out() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.name: .*plugins\.deny has Acme\.Dist"):
        config.resolve(RUN | {"optimizer": "of_acme", "plugins": {"deny": ["Acme.Dist"]}})
    assert "of_acme" not in sys.modules
    assert config.resolve(RUN | {"optimizer": "of_acme"})["optimizer"].route.name == "of_acme"


@pytest.mark.parametrize("lists", [{"deny": ["acme=="]}, {"deny": "acme-dist"}, {"denny": ["a"]}])
def test_nothing_is_imported_under_lists_that_cannot_be_read(lists) -> None:
    with pytest.raises(ConfigError, match="plugins"):
        config.resolve(RUN | {"optimizer": "of_acme", "plugins": lists})
    assert "of_acme" not in sys.modules


def test_an_unreadable_list_of_the_environment_is_told_once(monkeypatch) -> None:
    monkeypatch.setenv("CORE_PLUGIN_DENY", "a b")
    with pytest.raises(ConfigError) as raised:
        config.resolve(RUN)
    assert len(raised.value.faults) == 1
    assert "of_acme" not in sys.modules


def test_a_type_outside_of_the_run_has_the_same_policy(environment, monkeypatch) -> None:
    class SamplerPlugin(BasePlugin): ...

    environment.site("other").add("acme", sampler="x = never:imported")
    monkeypatch.setenv("CORE_PLUGIN_DENY", "acme")
    with pytest.raises(PluginDisabledError, match="CORE_PLUGIN_DENY has acme"):
        SamplerPlugin("x").resolve()

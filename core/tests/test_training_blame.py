"""Whose fault an error is: which plugin's, and where in its code."""

import pytest

from core_plugin.errors import ConfigError
from core_plugin.training import blame
from core_plugin.types import HookPlugin, OptimizerPlugin

pytestmark = pytest.mark.torchfree

MODULES = {
    "acme/__init__.py": "",
    "acme/plugins.py": """\
from acme.shared import fail

def one(model, params):
    return [1 / zero for zero in [0]]

def two(model, params):
    fail()

class Hook:
    def on_step(self, run):
        int("x")

def hook(params, run):
    return Hook()
""",
    "acme/shared.py": "def fail():\n    raise KeyError('x')\n",
    "again.py": "from acme import plugins\ndef one(model, params): plugins.one(model, params)\n",
    "elsewhere.py": "import json\ndef read():\n    json.loads('{')\n",
}


@pytest.fixture
def acme(environment):
    site = environment.site()
    optimizers = "one = acme.plugins:one\ntwo = acme.plugins:two"
    site.add("acme", optimizer=optimizers, hook="acme = acme.plugins:hook", modules=MODULES)
    return site.path


def error_of(function, *arguments) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        function(*arguments)
    # Without the line here: other tests have plugins in the package that this file is in.
    return raised.value.with_traceback(raised.tb.tb_next)


def test_the_plugin_is_told_as_closely_as_its_code_tells_it(acme) -> None:
    one, two = OptimizerPlugin("one"), OptimizerPlugin("acme:two")
    failed = error_of(one.resolve(), None, None)
    assert blame.where(failed) == f"{acme}/acme/plugins.py:4: optimizer 'one' of acme 1.0"
    hook = HookPlugin("acme").resolve()(None, None)
    both = "optimizer 'one' or hook 'acme' of acme 1.0"
    assert blame.where(error_of(hook.on_step, None)) == f"{acme}/acme/plugins.py:11: {both}"
    failed = error_of(two.resolve(), None, None)
    every = "optimizer 'one' or optimizer 'acme:two' or hook 'acme' of acme 1.0"
    assert blame.told(failed) == f"{acme}/acme/shared.py:2: {every}: KeyError: 'x'"


def test_the_innermost_of_two_plugins_is_told(acme, environment) -> None:
    OptimizerPlugin("one").resolve()
    environment.site("again").add("again", "2.0", optimizer="again = again:one")
    failed = error_of(OptimizerPlugin("again").resolve(), None, None)
    assert blame.where(failed) == f"{acme}/acme/plugins.py:4: optimizer 'one' of acme 1.0"


def test_code_of_no_plugin_is_told_alone_and_not_that_of_a_library(acme) -> None:
    import elsewhere

    told = blame.told(error_of(elsewhere.read))
    assert told.startswith(f"{acme}/elsewhere.py:3: JSONDecodeError: Expecting property name")


def test_a_users_mistake_says_itself_where_it_is() -> None:
    assert blame.told(ConfigError("run.yaml:3: no", "run.yaml:4: no")).count("\n") == 1


def test_a_bug_of_another_rank_shows_its_traceback(acme) -> None:
    OptimizerPlugin("one").resolve()
    bug = blame.BugError.of(error_of(OptimizerPlugin("one").resolve(), None, None))
    assert blame.told(bug).endswith(
        "optimizer 'one' of acme 1.0: ZeroDivisionError: division by zero"
    )
    assert "return [1 / zero for zero in [0]]" in str(bug)

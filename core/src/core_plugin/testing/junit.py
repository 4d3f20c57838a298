"""What pytest's JUnit report says of a conformance run as a whole."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from core_plugin.testing.conformance import NAME


@pytest.fixture(scope="session", autouse=True)
def conformance_properties(
    request: pytest.FixtureRequest, record_testsuite_property: Callable[[str, object], None]
) -> Iterator[None]:
    """At the end, the plugin, torch's version and the level that was reached."""
    yield
    conformance: Any = request.config.pluginmanager.get_plugin(NAME)
    report = conformance.report()
    for name in ("plugin", "params", "torch", "level"):
        record_testsuite_property(f"core-plugin {name}", getattr(report, name))

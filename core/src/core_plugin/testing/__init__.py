"""Conformance suites: what every plugin of a type must do, as tests that its author runs.

``core-plugin test device:fake`` runs one, and so does ``pytest --core-plugin device:fake``.
"""

from collections.abc import Sequence

__all__ = ["run"]


def run(options: Sequence[str]) -> int:
    """Run pytest with a suite, without the settings and plugins of the current directory.

    Returns:
        pytest's exit code, with 2 for a wrong option.
    """
    import os

    import pytest

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for variable in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(variable, None)
    settings = ["-c", os.devnull, "--rootdir", os.path.dirname(__file__), "-p", "no:cacheprovider"]
    looks = ["-q", "--no-header", "-rN", "--strict-markers"]
    code = pytest.main([*settings, *looks, "-p", "core_plugin.testing.plugin", *options])
    return 2 if code == pytest.ExitCode.USAGE_ERROR else int(code)

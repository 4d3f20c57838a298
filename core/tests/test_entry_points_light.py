"""Every installed plugin: what its entry point names is light, and is what its type asks for."""

import subprocess
import sys

import pytest

from core_plugin import discovery
from core_plugin.config import SLOTS

TYPES = {slot.plugin_type.type_name: slot.plugin_type for slot in SLOTS.values()}
CANDIDATES = [c for c in discovery.scan().candidates if not c.shadowed_by]


def test_no_entry_point_imports_torch() -> None:
    modules = sorted({c.value.partition(":")[0] for c in CANDIDATES})
    code = (
        "import importlib, sys\n"
        f"for module in {modules}:\n"
        "    importlib.import_module(module)\n"
        "    if 'torch' in sys.modules: sys.exit(module + ' imports torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: f"{c.type_name}-{c.name}")
def test_an_entry_point_is_what_its_type_asks_for(candidate) -> None:
    route = TYPES[candidate.type_name](candidate.qualified_name)
    assert route.resolve()
    assert route.registration().candidate == candidate
    assert route.params_type()

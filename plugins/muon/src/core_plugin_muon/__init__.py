"""The Muon optimizer, for core-plugin and alone.

`Muon` is the optimizer; `route` decides which parameters of a model it orthogonalizes, and
`format_report` is the table of what becomes of each. They load torch when they are first asked for,
so importing the package does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core_plugin_muon.optimizer import Muon as Muon
    from core_plugin_muon.options import Rule as Rule
    from core_plugin_muon.report import format_report as format_report
    from core_plugin_muon.routing import route as route

__version__ = "0.1.0"

_HOMES = {
    "Muon": "optimizer",
    "Rule": "options",
    "format_report": "report",
    "route": "routing",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

"""The injection engine that every PEFT method shares: match, replace, freeze, switch, merge, files.

A method (:class:`core_plugin.types.peft.BasePeft`) brings its parameters, a prefix and an
:class:`core_plugin.adapters.layer.AdapterLayer` for each kind of base layer; it is the same to
the engine as any other. The package imports torch, so light modules import it where they use it.
"""

from core_plugin.adapters.files import load_adapter, save_adapter
from core_plugin.adapters.hotswap import hotswap
from core_plugin.adapters.inject import add_adapter, initialize, inject
from core_plugin.adapters.merge import merge, unload, unmerge
from core_plugin.adapters.names import base_name
from core_plugin.adapters.samples import per_sample
from core_plugin.adapters.status import parts
from core_plugin.adapters.switch import (
    delete_adapter,
    disable_adapters,
    enable_adapters,
    set_adapter,
)
from core_plugin.adapters.walk import adapters, modules

__all__ = [
    "adapters",
    "add_adapter",
    "base_name",
    "delete_adapter",
    "disable_adapters",
    "enable_adapters",
    "hotswap",
    "initialize",
    "inject",
    "load_adapter",
    "merge",
    "modules",
    "parts",
    "per_sample",
    "save_adapter",
    "set_adapter",
    "unload",
    "unmerge",
]

"""The injection engine that every PEFT method shares: match, replace, freeze, name, save, load.

A method (:class:`core_plugin.types.peft.BasePeft`) brings its parameters, a prefix and an
:class:`core_plugin.adapters.layer.AdapterLayer` for each kind of base layer; it is the same to
the engine as any other. Importing this package does not import torch.
"""

from core_plugin.adapters.files import load_adapter, save_adapter
from core_plugin.adapters.inject import inject
from core_plugin.adapters.names import adapter_state, base_name

__all__ = ["adapter_state", "base_name", "inject", "load_adapter", "save_adapter"]

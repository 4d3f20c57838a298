"""One YAML file describes a PyTorch training run; every part of it comes from a plugin.

The plugin types are in :mod:`core_plugin.types`; importing this package does not import torch.
"""

from core_plugin.errors import (
    CheckpointError,
    ConfigError,
    CorePluginError,
    DeviceIndexError,
    PlanError,
    PluginConflictError,
    PluginContractError,
    PluginDisabledError,
    PluginIncompatibleError,
    PluginLoadError,
    PluginNotFoundError,
    PluginUnavailableError,
    RankMismatchError,
    TrainingError,
)

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "CorePluginError",
    "DeviceIndexError",
    "PlanError",
    "PluginConflictError",
    "PluginContractError",
    "PluginDisabledError",
    "PluginIncompatibleError",
    "PluginLoadError",
    "PluginNotFoundError",
    "PluginUnavailableError",
    "RankMismatchError",
    "TrainingError",
    "__version__",
]

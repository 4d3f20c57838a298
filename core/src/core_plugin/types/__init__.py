"""The plugin types: one file a type, with the contract that its implementations fulfil."""

from core_plugin.types.data import BaseData, DataPlugin
from core_plugin.types.device import BaseDevice, DevicePlugin, PrivateUse1Device
from core_plugin.types.distributed import BaseDistributed, Capabilities, DistributedPlugin
from core_plugin.types.hook import HookPlugin, Run, hookimpl
from core_plugin.types.kernel import KernelPlugin
from core_plugin.types.launcher import BaseLauncher, LauncherPlugin
from core_plugin.types.model import BaseModel, ModelPlugin
from core_plugin.types.optimizer import OptimizerPlugin
from core_plugin.types.peft import AdapterLayerPlugin, BasePeft, PeftPlugin
from core_plugin.types.scheduler import SchedulerPlugin

__all__ = [
    "AdapterLayerPlugin",
    "BaseData",
    "BaseDevice",
    "BaseDistributed",
    "BaseLauncher",
    "BaseModel",
    "BasePeft",
    "Capabilities",
    "DataPlugin",
    "DevicePlugin",
    "DistributedPlugin",
    "HookPlugin",
    "KernelPlugin",
    "LauncherPlugin",
    "ModelPlugin",
    "OptimizerPlugin",
    "PeftPlugin",
    "PrivateUse1Device",
    "Run",
    "SchedulerPlugin",
    "hookimpl",
]

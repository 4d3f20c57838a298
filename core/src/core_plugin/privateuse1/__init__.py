"""Devices that torch does not have itself, in its one slot for them (``PrivateUse1``)."""

from core_plugin.privateuse1.backend import NO_CAPABILITIES, DeviceBackend, DeviceCapabilities
from core_plugin.privateuse1.registration import has_backend, register, registered

__all__ = [
    "NO_CAPABILITIES",
    "DeviceBackend",
    "DeviceCapabilities",
    "has_backend",
    "register",
    "registered",
]

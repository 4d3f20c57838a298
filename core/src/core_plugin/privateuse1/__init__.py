"""Devices that torch does not have itself, in its one slot for them (``PrivateUse1``)."""

from core_plugin.privateuse1.backend import (
    NO_CAPABILITIES,
    DeviceBackend,
    DeviceCapabilities,
    backend_of,
)
from core_plugin.privateuse1.registration import Registration, has_backend, register, registered

__all__ = [
    "NO_CAPABILITIES",
    "DeviceBackend",
    "DeviceCapabilities",
    "Registration",
    "backend_of",
    "has_backend",
    "register",
    "registered",
]

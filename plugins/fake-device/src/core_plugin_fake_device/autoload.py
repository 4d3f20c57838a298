"""What torch calls when it is imported, as this package has an entry point in ``torch.backends``.

It does nothing unless ``FAKE_DEVICE_AUTOLOAD=1``. No failure may reach torch: it would break
``import torch`` for everything else.

A module of this package may be what imports torch. It is half imported then, and nothing is
registered: a registration waits for that module, and a module that registered while it is imported
would wait for the registration. The device is registered when it is asked for, by
``Fake.register``, a run or ``parse_device``.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module

VARIABLE = "FAKE_DEVICE_AUTOLOAD"
IMPORT_TORCH = ("core_plugin_fake_device.runtime", "core_plugin_fake_device.fakeccl")


def autoload() -> None:
    """Register the device, with default parameters, if the environment asks for it."""
    if os.environ.get(VARIABLE) != "1":
        return
    try:
        if _are_imported():
            _register()
    except Exception as error:
        warnings.warn(f"{VARIABLE}: {error}", RuntimeWarning, stacklevel=2)


def _are_imported() -> bool:
    """Import the modules, unless this thread, or one that waits for torch, is about to."""
    for name in IMPORT_TORCH:
        if _is_incomplete(name):
            return False
        import_module(name)
    return not any(_is_incomplete(name) for name in IMPORT_TORCH)


def _register() -> None:
    from core_plugin_fake_device.plugin import Fake

    Fake.register(Fake.Params())


def _is_incomplete(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))

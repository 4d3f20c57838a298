"""What torch calls when it is imported, as this package has an entry point in ``torch.backends``.

It does nothing unless ``FAKE_DEVICE_AUTOLOAD=1``. No failure may reach torch: it would break
``import torch`` for everything else. And a module of this package may be what imports torch; then
the device waits until that module is complete.
"""

from __future__ import annotations

import os
import sys
import warnings

VARIABLE = "FAKE_DEVICE_AUTOLOAD"
IMPORT_TORCH = ("core_plugin_fake_device.runtime", "core_plugin_fake_device.fakeccl")

_postponed = False


def autoload() -> None:
    """Register the device, with default parameters, if the environment asks for it."""
    global _postponed
    if os.environ.get(VARIABLE) != "1":
        return
    if any(_is_incomplete(name) for name in IMPORT_TORCH):
        _postponed = True
    else:
        _register()


def resume() -> None:
    """Make up for a call that came too early. Modules that import torch end with it."""
    global _postponed
    if _postponed:
        _postponed = False
        _register()


def _register() -> None:
    try:
        from core_plugin_fake_device.plugin import Fake

        Fake.register(Fake.Params())
    except Exception as error:
        warnings.warn(f"{VARIABLE}: {error}", RuntimeWarning, stacklevel=2)


def _is_incomplete(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))

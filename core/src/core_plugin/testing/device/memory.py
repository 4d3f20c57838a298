"""Memory that a device has to give back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from core_plugin.testing.device.subject import Subject


@contextmanager
def gives_back(nbytes: int, subject: Subject, device: torch.device) -> Iterator[None]:
    """Check that less memory is allocated after a block, if the device counts it.

    Raises:
        AssertionError: Fewer bytes were given back than asked for.
    """
    if not subject.declares("memory_statistics"):
        yield
        return
    allocated = torch.get_device_module(device).memory_allocated
    before = allocated(device)
    yield
    given_back = before - allocated(device)
    assert given_back >= nbytes, f"{given_back} bytes were given back, not {nbytes}"

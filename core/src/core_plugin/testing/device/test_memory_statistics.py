"""Memory that is allocated, and memory that cannot be."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.level(1)

MEBIBYTE = 2**20
TOO_MUCH = 2**60
"""Bytes that no device has."""


def test_too_much_memory_is_an_error_that_leaves_the_device_usable(device: torch.device) -> None:
    """More memory than there is raises a RuntimeError, and the next allocation works."""
    for _ in range(2):
        with pytest.raises(RuntimeError):  # torch.OutOfMemoryError is one
            torch.empty(TOO_MUCH, dtype=torch.uint8, device=device)
    x = torch.full((8,), 3.0, device=device)
    assert x.sum().item() == 24


@pytest.mark.requires("memory_statistics")
def test_allocated_memory_is_counted_until_it_is_freed(device: torch.device) -> None:
    """The bytes that are allocated grow by a tensor's, and fall when it is deleted."""
    allocated = torch.get_device_module(device).memory_allocated
    base = _base(device)
    x = torch.empty(4 * MEBIBYTE, dtype=torch.uint8, device=device)
    view = x[MEBIBYTE:]
    assert allocated(device) - base >= 4 * MEBIBYTE
    del x
    assert allocated(device) - base >= 4 * MEBIBYTE, "a view lost its memory"
    del view
    assert allocated(device) == base, f"{allocated(device) - base} bytes are left"


@pytest.mark.requires("memory_statistics")
def test_the_peak_stays_until_it_is_reset(device: torch.device) -> None:
    """The peak counts what was freed since, and a reset brings it down to what is allocated."""
    module = torch.get_device_module(device)
    base = _base(device)
    module.reset_peak_memory_stats(device)
    assert module.max_memory_allocated(device) == base
    x = torch.empty(4 * MEBIBYTE, dtype=torch.uint8, device=device)
    del x
    y = torch.empty(MEBIBYTE, dtype=torch.uint8, device=device)
    assert module.max_memory_allocated(device) - base >= 4 * MEBIBYTE
    module.reset_peak_memory_stats(device)
    peak = module.max_memory_allocated(device)
    assert peak == module.memory_allocated(device), "a reset peak is not what is allocated"
    assert peak - base < 4 * MEBIBYTE
    del y


@pytest.mark.requires("memory_statistics")
def test_training_steps_leave_no_memory_behind(device: torch.device) -> None:
    """As much memory is allocated after the fifth step as after the second."""
    allocated = torch.get_device_module(device).memory_allocated
    _base(device)
    layer = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.AdamW(layer.parameters())
    sizes = []
    for _ in range(5):
        layer(torch.ones(8, 64, device=device)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(allocated(device))
    assert sizes[1] > 0
    assert sizes[4] == sizes[1], f"bytes after each step: {sizes}"


@pytest.mark.requires("memory_statistics")
def test_memory_that_was_not_given_is_not_counted(device: torch.device) -> None:
    """An allocation that fails leaves the count as it was."""
    base = _base(device)
    with pytest.raises(RuntimeError):
        torch.empty(TOO_MUCH, dtype=torch.uint8, device=device)
    assert torch.get_device_module(device).memory_allocated(device) == base


def _base(device: torch.device) -> int:
    """What is allocated before a case allocates, without what earlier ones left to collect."""
    gc.collect()
    base: int = torch.get_device_module(device).memory_allocated(device)
    return base

"""Memory for merged tensors. To get it can cost more than the sums that fill it."""

from __future__ import annotations

import contextlib
import mmap
import sys

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
"""Bytes."""


def empty_like(tensor: Tensor) -> Tensor:
    """Memory for a tensor of the same kind, in large pages where that is possible."""
    if type(tensor) is not Tensor or not tensor.is_contiguous():
        return torch.empty_like(tensor)
    return _empty(tensor.numel(), tensor.dtype, tensor.device).view(tensor.shape)


def _empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for ``size`` elements.

    On Linux, what fills large pages on the CPU gets them: the system hands them out in a third of
    the time that as much memory in small ones takes it.
    """
    count = size * dtype.itemsize
    pages = -(-count // LARGE_PAGE)
    if sys.platform != "linux" or device.type != "cpu" or count <= 0.8 * pages * LARGE_PAGE:
        return torch.empty(size, dtype=dtype, device=device)
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    region = mmap.mmap(-1, pages * LARGE_PAGE, flags=kind)
    with contextlib.suppress(OSError):  # a system without large pages gives small ones
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=dtype, count=size)


class Scratch:
    """Float32 memory that serves one layer after another."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.device], Tensor] = {}

    def like(self, tensor: Tensor, key: str) -> Tensor:
        """Memory of a tensor's shape; that of the same key is overwritten."""
        place, size = (key, tensor.device), tensor.numel()
        if place not in self._memory or self._memory[place].numel() < size:
            self._memory[place] = _empty(size, torch.float32, tensor.device)
        return self._memory[place][:size].view(tensor.shape)

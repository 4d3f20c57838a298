"""Buffers that a forward pass changes, such as batch norm's running statistics."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core_plugin.tensors import model_tensors


class Statistics:
    """The persistent floating-point buffers of a model, kept equal on all ranks.

    Every rank changes them by its own data in a step; after it, each has changed by the mean of
    all ranks' changes. What nobody changed stays as it is, bit by bit. Other buffers are left
    alone: counters go the same way on all ranks, and what is not saved is made, not learned.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        saved = {id(tensor) for tensor in model_tensors(model).values()}
        self._model = model
        self._group = group
        self._names = [
            name
            for name, buffer in model.named_buffers()
            if group.size() > 1 and buffer.is_floating_point() and id(buffer) in saved
        ]
        self._before: list[Tensor] = []

    @torch.no_grad()
    def remember(self) -> None:
        """Keep the values that a step begins with; called before each of its forward passes."""
        if self._names and not self._before:
            self._before = [self._model.get_buffer(name).clone() for name in self._names]

    @torch.no_grad()
    def average(self) -> None:
        """Average what has changed since the step began: one collective, or none. Collective."""
        if not self._names:
            return
        buffers = [self._model.get_buffer(name) for name in self._names]
        wide = torch.float64 if any(b.dtype == torch.float64 for b in buffers) else torch.float32
        changes = torch.cat(
            [
                # An infinity that stays one has not changed.
                torch.where(now == before, 0, now.to(wide) - before.to(wide)).flatten()
                for now, before in zip(buffers, self._before, strict=True)
            ]
        )
        dist.all_reduce(changes, group=self._group)
        changes /= self._group.size()
        sizes = [buffer.numel() for buffer in buffers]
        for now, before, change in zip(buffers, self._before, changes.split(sizes), strict=True):
            now.copy_(before.to(wide) + change.view_as(before))
        self._before = []

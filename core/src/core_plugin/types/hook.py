"""Hooks: what watches a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from core_plugin.plugin import BasePlugin

if TYPE_CHECKING:
    import tokenizers
    import torch
    from torch import nn

hookspec = pluggy.HookspecMarker("core_plugin")
hookimpl = pluggy.HookimplMarker("core_plugin")
"""Marks the methods of a hook that answer an event; their names are those in :class:`Events`."""


@dataclass
class Run:
    """What a hook sees of a run. It is the same object for the whole run."""

    directory: Path
    """Where the run writes."""
    config: Mapping[str, Any]
    """The resolved configuration."""
    rank: int
    world_size: int
    steps: int
    """The number of optimizer steps of the whole run."""
    start_step: int
    """The step that the run began or resumed at."""
    model: nn.Module
    """The model as it is trained: wrapped, sharded, on its device."""
    device: torch.device
    tokenizer: tokenizers.Tokenizer
    step: int = 0
    """The number of optimizer steps that are done."""


class Events:
    """The events of a run, called on every rank. A hook may leave arguments out.

    A run that a signal stops saves: ``on_checkpoint`` is then its last event.

    A hook may do collective work in ``on_start``, ``on_checkpoint`` and ``on_end`` only, and then
    on all ranks alike.
    """

    @hookspec
    def on_start(self, run: Run) -> None:
        """The run is about to take its first step."""

    @hookspec
    def on_step(self, run: Run) -> None:
        """An optimizer step is done. Nothing was waited for: metrics come with :meth:`on_log`."""

    @hookspec
    def on_log(self, run: Run, metrics: Mapping[str, float]) -> None:
        """A step whose metrics were computed is done.

        Args:
            run: The run.
            metrics: ``step``, ``loss`` (mean over the supervised tokens since the last log),
                ``grad_norm`` (before clipping), ``lr``, ``tokens`` (supervised, since the start),
                and, which alone differ between ranks, ``tokens_per_second`` and ``seconds`` (since
                the start).
        """

    @hookspec
    def on_checkpoint(self, run: Run, path: Path) -> None:
        """A checkpoint is complete.

        With ``checkpoint.asynchronous`` that is some steps after the one that it is of, which its
        path tells.
        """

    @hookspec
    def on_end(self, run: Run) -> None:
        """The run took its last step and saved."""

    @hookspec
    def on_error(self, run: Run, error: BaseException) -> None:
        """The run stops because of an exception, on this rank at least; no collective works."""


def hook(params: Any, run: Run) -> object | None:
    """Make a hook: an object with methods marked ``@hookimpl``, or None to stay out on this rank.

    Called on every rank before ``on_start``, after the model is ready and a checkpoint is loaded.
    """


class HookPlugin(BasePlugin, contract=hook):
    """The type of hooks: functions ``(params, run) -> object | None``."""

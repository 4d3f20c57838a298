"""The hook ``tensorboard``: event files for TensorBoard."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from core_plugin.contract import NoParams
from core_plugin.errors import PluginUnavailableError
from core_plugin.types.hook import Run, hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping


def tensorboard(params: NoParams, run: Run) -> object | None:
    """Write each log's metrics, under their own names, to ``tensorboard/`` in the run's directory.

    Raises:
        PluginUnavailableError: TensorBoard is not installed; on every rank, so that none waits.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise PluginUnavailableError(
            "the hook 'tensorboard' needs TensorBoard: pip install core-plugin[tensorboard]"
        )
    return TensorBoard(run) if run.rank == 0 else None


class TensorBoard:
    """Steps after the one that the run starts at, which an earlier run wrote, are hidden."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(run.directory / "tensorboard"), purge_step=run.start_step + 1
        )

    @hookimpl
    def on_log(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Add each metric but the step itself."""
        for name, value in metrics.items():
            if name != "step":
                self._writer.add_scalar(name, value, run.step)

    @hookimpl
    def on_checkpoint(self) -> None:
        """Wait for the writer's thread: for a run that a signal stops, no other event comes."""
        self._writer.flush()

    @hookimpl
    def on_end(self) -> None:
        """Close the file."""
        self._writer.close()

    @hookimpl
    def on_error(self) -> None:
        """Close the file, with what was logged before the error."""
        self._writer.close()

"""A third party's data that fails, or sleeps for ever, as soon as a file says so."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from core_plugin.builtin.text import Text
from core_plugin.types.data import Samples

READING = 0.004
"""Seconds that it takes to read a sample, so that there is time between two steps."""


class Brittle(Text):
    """Text, until ``$RECORDER_DIRECTORY/fault`` holds ``raise`` or ``sleep`` and a rank."""

    @staticmethod
    def load(params: Any, tokenizer: Any) -> Samples:
        return BrittleSamples(Text.load(params, tokenizer))


class BrittleSamples:
    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._fault = Path(os.environ["RECORDER_DIRECTORY"], "fault")
        self._rank = os.environ.get("RANK", "0")

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        time.sleep(READING)
        if self._fault.exists():
            what, rank = self._fault.read_text().split()
            if rank == self._rank and what == "raise":
                raise OSError("the sample cannot be read")
            if rank == self._rank:
                time.sleep(3600)
        return self._samples[index]

"""The hook ``sample``: what the trained model writes."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import TYPE_CHECKING

from core_plugin.builtin import tokenization
from core_plugin.builtin.hooks import metrics_log
from core_plugin.params import require
from core_plugin.types.hook import Run, hookimpl

if TYPE_CHECKING:
    import tokenizers
    import torch


@dataclasses.dataclass(frozen=True)
class Params:
    """What is asked of the model.

    Attributes:
        prompt: The text to continue. An empty one stands for the tokenizer's first special token
            (that of a built-in data source ends a text), or for its token 0 if it has none.
        tokens: How many are sampled.
        temperature: The logits are divided by it; 0 takes the likeliest token each time.
        top_k: Sample among this many of the likeliest tokens; None for all.
        context: How many of the last tokens the model is given.
        seed: Of the sampling alone; the run's own random numbers are left untouched.
    """

    prompt: str = ""
    tokens: int = 64
    temperature: float = 0.8
    top_k: int | None = 40
    context: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        require(
            *(
                (value is None or value >= 1, f"{name} must be at least 1, got {value}")
                for name in ("tokens", "top_k", "context")
                for value in [getattr(self, name)]
            ),
            (
                0 <= self.temperature < math.inf,
                f"temperature must not be negative, got {self.temperature}",
            ),
            (0 <= self.seed < 2**63, f"seed must be in [0, 2**63), got {self.seed}"),
        )


def sample(params: Params, run: Run) -> object | None:
    """Print a continuation of a prompt at the end, and add it to the run's ``samples.jsonl``."""
    return Sample(params)


class Sample:
    """On every rank, since a forward pass of a sharded model needs them all."""

    def __init__(self, params: Params) -> None:
        self._params = params

    @hookimpl
    def on_end(self, run: Run) -> None:
        """Sample. Collective."""
        params = self._params
        text = run.tokenizer.decode(generate(run, params), skip_special_tokens=False)
        if run.rank != 0:
            return
        path = run.directory / "samples.jsonl"
        metrics_log.keep(path, run.step - 1)
        metrics_log.append(path, {"step": run.step, "prompt": params.prompt, "text": text})
        print(f"sample at step {run.step}:\n{_printable(params.prompt + text)}", flush=True)


def generate(run: Run, params: Params) -> list[int]:
    """The ids of the sampled tokens; the model is called equally often on every rank."""
    import torch

    ids = _prompt(run.tokenizer, params.prompt)
    start = len(ids)
    generator = torch.Generator().manual_seed(params.seed)
    training = run.model.training
    run.model.eval()
    try:
        with torch.no_grad():
            for _ in range(params.tokens):
                window = torch.tensor([ids[-params.context :]], device=run.device)
                ids.append(_choose(run.model(window)[0, -1].cpu().double(), params, generator))
    finally:
        run.model.train(training)
    return ids[start:]


def _prompt(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    ids = tokenization.encode(tokenizer, [text], special=True)[0]
    special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return ids or [min(special, default=0)]


def _choose(logits: torch.Tensor, params: Params, generator: torch.Generator) -> int:
    """One token of ``logits [vocabulary]``."""
    import torch

    if params.temperature == 0:
        return int(logits.argmax())
    best, tokens = logits.topk(min(params.top_k or len(logits), len(logits)))
    # The largest is subtracted first, so that a tiny temperature makes no infinity of it.
    probabilities = ((best - best[0]) / params.temperature).softmax(0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


def _printable(text: str) -> str:
    """Without what would steer a terminal, or what it has no character for."""
    shown = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, "replace").decode(encoding)

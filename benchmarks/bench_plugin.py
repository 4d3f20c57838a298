"""Plugins that the benchmarks run with: data without a file, and hooks that measure."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from common import note_cpu

from core_plugin.types import BaseData
from core_plugin.types.hook import Run, hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    import tokenizers
    import torch
    from torch import nn

    from core_plugin.training.saving import Saver


class RandomTokens(BaseData):
    """Random tokens, in samples of one length."""

    @dataclasses.dataclass(frozen=True)
    class Params:
        """The sizes.

        Attributes:
            vocabulary_size: Different tokens.
            sequence_length: Tokens of a sample.
            samples: Samples.
        """

        vocabulary_size: int = 2048
        sequence_length: int = 256
        samples: int = 256

    @staticmethod
    def tokenizer(params: Params) -> tokenizers.Tokenizer:
        """One with that many tokens."""
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel

        words = {str(i): i for i in range(params.vocabulary_size)}
        return Tokenizer(WordLevel(words, unk_token="0"))

    @staticmethod
    def load(params: Params, tokenizer: tokenizers.Tokenizer) -> Sequence[Mapping]:
        """The samples."""
        tokens = random_tokens(params, tokenizer)
        return [{"input_ids": t[:-1], "labels": t[1:]} for t in tokens]


def random_tokens(params: RandomTokens.Params, tokenizer: tokenizers.Tokenizer) -> torch.Tensor:
    """``[samples, sequence_length + 1]``."""
    import torch

    size = (params.samples, params.sequence_length + 1)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(tokenizer.get_vocab_size(), size, generator=generator)


@dataclasses.dataclass(frozen=True)
class Report:
    """Where a hook writes what it measured.

    Attributes:
        path: A file, or a directory.
    """

    path: str = "report"


def first_step(params: Report, run: Run) -> object:
    """Write down the CPU seconds from the command to the end of the first step."""
    return FirstStep(Path(params.path), run.start_step + 1)


def by_hand(params: Report, run: Run) -> object:
    """After each step take one that is written by hand, and time both."""
    return ByHand(Path(params.path), hand_written(run))


def saves(params: Report, run: Run) -> object:
    """Save by turns in each of the ways of :class:`Saves`, and time how long training waits."""
    return Saves(Path(params.path), run)


def steps(params: Report, run: Run) -> object | None:
    """Write down, on rank 0, the process and the time of each step."""
    return Steps(Path(params.path)) if run.rank == 0 else None


first_step.Params = by_hand.Params = saves.Params = steps.Params = Report


@dataclasses.dataclass(frozen=True)
class Held:
    """Text that is held back, and when to look at it.

    Attributes:
        text: A file.
        windows: As many samples of it, evenly spread.
        every: Steps between two looks.
    """

    text: str
    windows: int = 32
    every: int = 10


def validation(params: Held, run: Run) -> object:
    """Write down the loss on held-back text, and the CPU seconds of training until then."""
    return Validation(params, run)


validation.Params = Held


class FirstStep:
    """Writes down the CPU seconds of each rank at the end of one step."""

    def __init__(self, directory: Path, step: int) -> None:
        self.directory = directory
        self.step = step

    @hookimpl
    def on_step(self, run: Run) -> None:
        """Write them."""
        if run.step == self.step:
            note_cpu(self.directory, run.rank)


class Steps:
    """Writes a line at the end of each step: the process, and the time of day in seconds."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @hookimpl
    def on_step(self, run: Run) -> None:
        """Write it."""
        with self.file.open("a") as opened:
            opened.write(f"{os.getpid()} {time.time()}\n")


class Validation:
    """Writes a line at some steps: the step, the loss, and the CPU seconds without its own."""

    def __init__(self, params: Held, run: Run) -> None:
        from core_plugin.builtin.text import Text

        length = run.config["data"]["sequence_length"]
        samples = Text.load(Text.Params(path=params.text, sequence_length=length), run.tokenizer)
        chosen = range(0, len(samples) - 1, len(samples) // params.windows)[: params.windows]
        self.batch = Text.collate([samples[i] for i in chosen])
        self.every, self.file, self.own = params.every, run.directory / "validation.jsonl", 0.0

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Start the time."""
        self.began = time.process_time()

    @hookimpl
    def on_step(self, run: Run) -> None:
        """Write a line, if it is time."""
        if run.step % self.every:
            return
        began = time.process_time()
        record = {"step": run.step, "loss": self.loss(run), "cpu": began - self.began - self.own}
        with self.file.open("a") as opened:
            opened.write(json.dumps(record) + "\n")
        self.own += time.process_time() - began

    def loss(self, run: Run) -> float:
        """The mean over the tokens."""
        import torch

        from core_plugin.builtin.decoder import Decoder

        with torch.no_grad():
            return float(Decoder.loss(run.model, self.batch)) / self.batch["labels"].numel()


class ByHand:
    """Times core-plugin's steps, hook calls included, and hand-written ones in between.

    A rank that is early waits outside of both times.
    """

    def __init__(self, report: Path, step: Callable[[], None]) -> None:
        self.report = report
        self.step = step
        self.times: dict[str, list[tuple[float, float]]] = {"core-plugin": [], "by hand": []}

    @hookimpl
    def on_start(self, run: Run) -> None:
        """Start the first step's time."""
        self.began = now(run)

    @hookimpl
    def on_step(self, run: Run) -> None:
        """Stop core-plugin's time, and take and time the other step."""
        self.note("core-plugin")
        self.began = now(run)
        self.step()
        self.note("by hand")
        self.began = now(run)

    def note(self, which: str) -> None:
        """Keep the wall and CPU milliseconds since the time was started."""
        ended = (time.perf_counter(), time.process_time())
        wall, cpu = (1e3 * (b - a) for a, b in zip(self.began, ended, strict=True))
        self.times[which].append((wall, cpu))

    @hookimpl
    def on_end(self, run: Run) -> None:
        """Write all times."""
        if run.rank == 0:
            self.report.write_text(json.dumps(self.times))


class Saves:
    """Saves by turns with core-plugin and with torch alone, at once and in the background.

    It notes the seconds for which a save keeps training from going on, and the steps that are done
    until one in the background is over.
    """

    WAYS = ("core-plugin", "core-plugin, in the background", "torch", "torch, in the background")

    def __init__(self, report: Path, run: Run) -> None:
        import torch.distributed as dist

        from core_plugin.training.saving import Saver

        self.report, self.directory, self.save_at = report, run.directory, Saver.save
        self.group = dist.new_group(backend="gloo")
        self.ways = itertools.cycle(self.WAYS)
        self.blocked: dict[str, list[float]] = {way: [] for way in self.WAYS}
        self.steps: dict[str, list[int]] = {way: [] for way in self.WAYS}
        self.under_way: Future | None = None
        Saver.save = lambda saver: self.save(saver)

    def save(self, saver: Saver) -> None:
        """Save in the next way, once what was saved before is over."""
        import torch.distributed as dist

        saver.finish()
        if self.under_way:
            self.under_way.result()
        way = next(self.ways)
        in_background = way.endswith("background")
        dist.barrier()
        began = time.perf_counter()
        if way.startswith("torch"):
            self.under_way = self.save_with_torch(saver, in_background)
        else:
            saver._in_background = in_background
            self.save_at(saver)
            self.under_way = saver._under_way
        self.blocked[way].append(time.perf_counter() - began)
        self.steps[way].append(0)
        self.way = way

    def save_with_torch(self, saver: Saver, in_background: bool) -> Future | None:
        """As torch's own documentation saves, over a group of its own."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        training = saver._training
        model, optimizer = get_state_dict(training.model, training.optimizer)
        save = dcp.async_save if in_background else dcp.save
        place = self.directory / f"torch-{training.step}"
        done = save(
            {"model": model, "optimizer": optimizer}, checkpoint_id=place, process_group=self.group
        )
        return done if in_background else None

    @hookimpl
    def on_step(self, run: Run) -> None:
        """Count the step if a save is under way."""
        if self.under_way and not self.under_way.done():
            self.steps[self.way][-1] += 1

    @hookimpl
    def on_end(self, run: Run) -> None:
        """Write all times."""
        if run.rank == 0:
            self.report.write_text(json.dumps({"blocked": self.blocked, "steps": self.steps}))


def now(run: Run) -> tuple[float, float]:
    """The wall and CPU time, once all ranks are here."""
    import torch.distributed as dist

    if run.world_size > 1:
        dist.barrier()
    return time.perf_counter(), time.process_time()


def hand_written(run: Run) -> Callable[[], None]:
    """The shortest loop that trains the same model on the same data; a function per step."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.utils import clip_grad_norm_

    train = run.config["train"]
    data = RandomTokens.Params(**without_name(run.config["data"]))
    tokens = random_tokens(data, run.tokenizer)
    share = train["global_batch_size"] // run.world_size
    batches = itertools.cycle(tokens[run.rank :: run.world_size].split(share))

    model = wrapped(decoder(run), run.config["distributed"]["name"])
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": others, "weight_decay": 0.0}],
        **without_name(run.config["optimizer"]),
        fused=True,
    )
    model.train()

    def step() -> None:
        batch = next(batches)
        logits = model(batch[:, :-1])
        cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        clip_grad_norm_(model.parameters(), train["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()

    return step


def decoder(run: Run) -> nn.Module:
    """The model that the run trains, with other values."""
    from core_plugin.builtin.decoder import Decoder

    return Decoder.build(
        Decoder.Params(**without_name(run.config["model"])), run.tokenizer.get_vocab_size()
    )


def wrapped(model: nn.Module, strategy: str) -> nn.Module:
    """The model as torch's own documentation distributes it."""
    if strategy == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if strategy == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)
    return model


def without_name(config: Mapping) -> dict:
    """A plugin's parameters."""
    return {key: value for key, value in config.items() if key != "name"}

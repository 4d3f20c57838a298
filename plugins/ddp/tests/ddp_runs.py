"""Scenarios: whole runs on real ranks, by core-plugin's own loop."""

import json
import os
import sys
from pathlib import Path

import torch
from ddp_processes import joins_itself
from torch import nn

from core_plugin import config
from core_plugin.builtin.decoder import Decoder
from core_plugin.training.worker import Worker
from core_plugin.types import ModelPlugin


class Normed(nn.Module):
    """A decoder between batch norm and a layer that not every rank has, or uses."""

    def __init__(self, decoder: nn.Module, vocabulary_size: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.norm = nn.BatchNorm1d(vocabulary_size)
        self.sometimes = nn.Linear(1, 1)
        if "HAS_MORE" in os.environ:
            self.more = nn.Linear(1, 1)

    def forward(self, *arguments, **options):
        logits = self.norm(self.decoder(*arguments, **options).transpose(1, 2)).transpose(1, 2)
        used = "USES_LESS" not in os.environ
        return logits + self.sometimes(logits[..., :1]) if used else logits


@ModelPlugin("ddp_normed").register()
class NormedModel(Decoder):
    @staticmethod
    def build(params: Decoder.Params, vocabulary_size: int) -> nn.Module:
        return Normed(Decoder.build(params, vocabulary_size), vocabulary_size)

    @staticmethod
    def initialize(module: nn.Module) -> None:
        module.reset_parameters()

    @staticmethod
    def blocks(model: nn.Module) -> list[nn.Module]:
        return Decoder.blocks(model.decoder)


@joins_itself
def train(rank: int, world_size: int, directory: str, port: str) -> None:
    """Run ``run.json`` of the directory; each rank leaves its exit code and its messages.

    The file's ``environment`` has variables by rank.
    """
    here = Path(directory)
    document = json.loads((here / "run.json").read_text())
    os.chdir(directory)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        **document.pop("environment", {}).get(str(rank), {}),
    }
    torch.set_num_threads(1)
    with (here / f"errors-{rank}").open("w") as errors:
        sys.stderr = errors
        code = Worker(config.resolve(document))()
        sys.stderr = sys.__stderr__
    (here / f"exit-{rank}").write_text(str(code))

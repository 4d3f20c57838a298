"""Models whose parameters are routed, and short forms of what becomes of them."""

import torch
from torch import nn

from core_plugin_muon.options import Rule
from core_plugin_muon.routing import Route, route

VOCABULARY, WIDTH = 50, 8
UNTAKEN = "no layer takes its outputs: an output head (a guess)"


class Block(nn.Module):
    def __init__(self, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)


class LanguageModel(nn.Module):
    """Names are chosen to mislead whoever goes by them."""

    def __init__(self, tied: bool = False, positions: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        self.table = nn.Embedding(positions, WIDTH)
        self.embed_layers = nn.ModuleList([Block(), Block()])
        self.proj = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.proj.weight = self.encoder.weight


def rows(model: nn.Module, *rules: Rule) -> dict[str, Route]:
    return {row.name: row for row in route(model, rules)}


def reasons(model: nn.Module, *rules: Rule) -> dict[str, str]:
    return {name: row.reason for name, row in rows(model, *rules).items()}


def of_muon(model: nn.Module, *rules: Rule) -> list[str]:
    return [name for name, row in rows(model, *rules).items() if row.algorithm == "muon"]


def with_hidden(**modules: nn.Module) -> nn.ModuleDict:
    """A model that has a hidden matrix besides."""
    return nn.ModuleDict({"hidden": nn.Linear(WIDTH, WIDTH, bias=False), **modules})


HIDDEN = [f"embed_layers.{i}.{name}.weight" for i in (0, 1) for name in ("attention", "up", "down")]


class Experts(nn.Module):
    def __init__(self, declared: int) -> None:
        super().__init__()
        self.num_experts = declared
        self.up = nn.Parameter(torch.zeros(4, 2 * WIDTH, WIDTH))
        self.up_bias = nn.Parameter(torch.zeros(4, 2 * WIDTH))
        self.scale = nn.Parameter(torch.zeros(4, 1, WIDTH))
        self.router = nn.Parameter(torch.zeros(4, WIDTH))

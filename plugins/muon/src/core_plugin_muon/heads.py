"""Which modules of a model are its output heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from torch import nn

from core_plugin_muon.places import Place

_INPUTS = ("in_features", "embed_dim", "input_size", "nx")
_OUTPUTS = ("out_features", "out_channels", "embedding_dim", "embed_dim", "hidden_size", "nf")
_NAMES = ("lm_head", "score", "classifier")
_NAMES_OUTSIDE = (*_NAMES, "head", "output")


@dataclass(frozen=True)
class Heads:
    """What tells a model's output heads from its hidden layers.

    Attributes:
        declared: ids of the modules in what a `get_output_embeddings` of the model returns.
        vocabularies: the number of entries of each embedding.
        widths: the numbers of features that the model's layers and norms take.
        channels: the numbers of channels that its convolutions take, but for the first, which
            takes the channels of an image.
        flattened: the widths that no layer gives, so that they may be channels times positions.
    """

    declared: frozenset[int]
    vocabularies: frozenset[int]
    widths: frozenset[int]
    channels: frozenset[int]
    flattened: frozenset[int]

    @classmethod
    def of(cls, model: nn.Module) -> Heads:
        """Read a model."""
        modules = list(model.modules())
        norms = {width for module in modules for width in _norm(module)}
        taken = {width for module in modules for width in _sizes(module, _INPUTS)}
        given = {width for module in modules for width in _sizes(module, _OUTPUTS)}
        channels = [width for module in modules for width in _sizes(module, ("in_channels",))]
        return cls(
            frozenset(id(part) for module in modules for part in _declared(module)),
            frozenset(n for module in modules for n in _sizes(module, ("num_embeddings",))),
            frozenset(taken | norms),
            frozenset(channels[1:]),
            frozenset(taken - norms - given),
        )

    def reason(self, place: Place) -> str | None:
        """Why the module that holds a parameter is an output head; None if it is not.

        It is one if the model declares it, or if it has as many outputs as an embedding has
        entries and no layer takes them. Outside the repeated blocks the largest embedding decides
        even if a layer takes as many; inside only that one counts, and only for a layer with more
        outputs than inputs, since attention has keys and values that no layer takes. Else a layer
        outside the blocks, or the last matrix of one, is guessed to be a head if no layer takes
        its outputs, and any by its name.
        """
        if id(place.owner) in self.declared:
            return "output head"
        if self._gives_vocabulary(place):
            return "output head"
        if (not place.in_block or place.ends_block) and not self._is_taken(place.owner):
            return "no layer takes its outputs: an output head (a guess)"
        names = _NAMES if place.in_block else _NAMES_OUTSIDE
        return "named like an output head (a guess)" if place.module in names else None

    def _gives_vocabulary(self, place: Place) -> bool:
        outputs = getattr(place.owner, "out_features", None)
        if outputs not in self.vocabularies:
            return False
        largest, taken = outputs == max(self.vocabularies), outputs in self.widths
        if place.in_block:
            return largest and not taken and outputs > min(_sizes(place.owner, _INPUTS), default=0)
        return largest or not taken

    def _is_taken(self, owner: nn.Module) -> bool:
        """Whether a layer may take the owner's outputs; flattened, if they are channels."""
        for outputs in _sizes(owner, ("out_features",)):
            return outputs in self.widths
        for outputs in _sizes(owner, ("out_channels",)):
            as_they_are = outputs in self.widths | self.channels
            return as_they_are or any(width % outputs == 0 for width in self.flattened)
        return True


def _declared(module: nn.Module) -> Iterator[nn.Module]:
    head = None
    if callable(method := getattr(module, "get_output_embeddings", None)):
        with suppress(NotImplementedError):
            head = method()
    if isinstance(head, nn.Module):
        yield from head.modules()


def _sizes(module: nn.Module, attributes: tuple[str, ...]) -> Iterator[int]:
    for attribute in attributes:
        if isinstance(width := getattr(module, attribute, None), int):
            yield width


def _norm(module: nn.Module) -> Iterator[int]:
    weight = module._parameters.get("weight")
    if weight is not None and weight.ndim == 1:
        yield weight.shape[0]

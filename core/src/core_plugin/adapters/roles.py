"""What layers are for, found by structure: linear layers, the head, the input embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from core_plugin.adapters.tree import Site, Sites, weight_is_read

TASK_HEADS: Mapping[str, tuple[str, ...]] = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
"""What the heads of the models for a task are called; a new one is random and so it is trained."""


def linear_layers(model_sites: Sites) -> list[Site]:
    """Every ``nn.Linear``, and GPT-2's Conv1D, apart from the output head.

    What ``nn.MultiheadAttention`` holds is left out too: it is never called, only its weight is
    read.
    """
    linear = _linear(model_sites)
    heads = output_heads(model_sites, linear)
    return [site for site in linear if site not in heads and not weight_is_read(site)]


def _linear(model_sites: Sites) -> list[Site]:
    linear = [k for k in model_sites.kinds if issubclass(k, nn.Linear) or _is_conv1d(k)]
    return model_sites.of_kind(*linear)


def _is_conv1d(kind: type[nn.Module]) -> bool:
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return "transformers.pytorch_utils.Conv1D" in names


def output_heads(model_sites: Sites, linear: Sequence[Site]) -> set[Site]:
    """The linear layers that make the logits of tokens.

    They are those whose weight is tied to an embedding's, and what the model itself says
    (``get_output_embeddings()``). Of a model that does not say, they are those outside the
    repeated blocks with as many outputs as an embedding there has rows.
    """
    embeddings = _embeddings(model_sites)
    tied = {id(site.base.weight) for site in embeddings}
    says, head = _asked(model_sites, "get_output_embeddings")
    rows = {s.base.num_embeddings for s in embeddings if not (s.in_block or says)}
    return {
        site
        for site in linear
        if site is head
        or id(site.base._parameters.get("weight")) in tied
        or (not site.in_block and _outputs(site.base) in rows)
    }


def input_embeddings(model_sites: Sites) -> list[Site]:
    """The embedding of the tokens; several if it cannot be told which it is.

    It is what the model itself says (``get_input_embeddings()``), or the only one outside the
    repeated blocks, or the only one there with as many rows as the output head has outputs.
    """
    _, said = _asked(model_sites, "get_input_embeddings")
    if said:
        return [said]
    every = _embeddings(model_sites)
    embeddings = [site for site in every if not site.in_block] or every
    heads = output_heads(model_sites, _linear(model_sites))
    outputs = {_outputs(head.base) for head in heads}
    return [site for site in embeddings if site.base.num_embeddings in outputs] or embeddings


def _embeddings(model_sites: Sites) -> list[Any]:
    return [*model_sites.of_kind(nn.Embedding)]


def _outputs(layer: Any) -> int:
    size: int = layer.out_features if isinstance(layer, nn.Linear) else layer.nf
    return size


def _asked(model_sites: Sites, method: str) -> tuple[bool, Site | None]:
    """Whether a model answers when one of its methods is asked, and the site that it tells."""
    ask = getattr(model_sites.model, method, None)
    if ask is None:
        return False, None
    try:
        answer = ask()
    except (NotImplementedError, AttributeError):
        return False, None
    if answer is None:
        return True, None
    told = (site for site in model_sites if answer in (site.module, site.base))
    return True, next(told, None)

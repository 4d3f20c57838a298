"""What is trained beside the adapters: modules as a whole, and rows of embeddings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from core_plugin.adapters.roles import TASK_HEADS, input_embeddings
from core_plugin.adapters.rules import Names, Report, Rule, some, without_hits
from core_plugin.adapters.selection import inside
from core_plugin.adapters.tree import Site, Sites, weight_is_read

TOKENS = "trainable_token_indices"


def saved_modules(modules: Names[Site], params: Any, report: Report) -> list[Site]:
    """The modules that are trained whole: those of ``modules_to_save``, and the task's heads.

    Not all of a task's heads have to be there: files of the peft library name them all. Those
    inside another one are left out, since they are trained with it.
    """
    named: Rule = params.modules_to_save or []
    heads = TASK_HEADS.get(params.task_type, ())
    hits = modules.match(named)
    unmatched = [entry for entry in without_hits(hits) if entry not in heads]
    report.fault("modules_to_save", *modules.missing(named, unmatched))
    found = [site for pairs in hits.values() for _, site in pairs]
    for pairs in modules.match([head for head in heads if head not in hits]).values():
        found += [site for _, site in pairs if not site.in_block]
    if heads and not found:
        report.warn("task_type", _no_head(params.task_type, heads))
    within = inside(found)
    saved = [site for site in modules.in_order(found) if id(site.module) not in within]
    report.fault("modules_to_save", *(f"{s.path} {why}" for s in saved if (why := _uncalled(s))))
    return saved


def _no_head(task: str, heads: Sequence[str]) -> str:
    return (
        f"{task} trains the model's head whole, but no module is called {' or '.join(heads)}; "
        "name the head under modules_to_save"
    )


def _uncalled(site: Site) -> str:
    """What to say of a module that nobody calls, for which a copy could not stand in."""
    if isinstance(site.base, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
        return f"is an nn.{type(site.base).__name__}, which is never called; name what is in it"
    if weight_is_read(site):
        return "is never called: nn.MultiheadAttention reads its weight"
    return ""


def token_rows(
    model_sites: Sites,
    modules: Names[Site],
    params: Any,
    saved: Sequence[Site],
    report: Report,
) -> list[tuple[Site, list[int]]]:
    """The modules of which some rows are trained, and which."""
    wanted: Mapping[str, list[int]] | list[int] = getattr(params, TOKENS, None) or {}
    if isinstance(wanted, Mapping):
        hits = modules.match(list(wanted))
        report.fault(TOKENS, *modules.missing([], without_hits(hits)))
        found = [(s, wanted[e]) for e in hits for s in dict.fromkeys(s for _, s in hits[e])]
    else:
        embeddings = input_embeddings(model_sites)
        if len(embeddings) != 1:
            report.fault(TOKENS, _which(embeddings))
        found = [(site, wanted) for site in embeddings[:1]]
    whole, within = set(saved), inside(saved)
    for site, rows in found:
        is_whole = site in whole or id(site.module) in within
        reasons = (
            ["is trained whole already (modules_to_save)"] if is_whole else _faults(site, rows)
        )
        report.fault(TOKENS, *(f"{site.path} {reason}" for reason in reasons))
    twice = {site: None for site, count in Counter(s for s, _ in found).items() if count > 1}
    report.fault(TOKENS, *(f"{site.path} is what two of the names mean" for site in twice))
    return [(site, list(rows)) for site, rows in found]


def _which(embeddings: Sequence[Site]) -> str:
    if not embeddings:
        return "the model has no nn.Embedding; name the module, {name: rows}"
    names = some([site.path for site in embeddings])
    return (
        f"which embedding is meant cannot be told from the model ({names}); name it: {{name: rows}}"
    )


def _faults(site: Site, rows: Sequence[int]) -> Iterator[str]:
    weight = getattr(site.base, "weight", None)
    if weight is None or weight.ndim != 2:
        yield "has no weight with rows"
        return
    wrong = [str(row) for row in rows if not 0 <= row < len(weight)]
    if wrong:
        yield f"has the rows 0 to {len(weight) - 1}, got {some(wrong)}"
    twice = [str(row) for row, count in Counter(rows).items() if count > 1]
    if twice:
        yield f"has each row once, got {some(twice)} more than once"

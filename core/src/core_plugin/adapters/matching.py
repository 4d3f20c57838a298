"""Which modules and parameters a method's parameters mean, and with which values at each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from core_plugin.adapters.patterns import changed_params
from core_plugin.adapters.roles import linear_layers
from core_plugin.adapters.rules import Names, Report, Rule, some, without_hits
from core_plugin.adapters.selection import Place, Selection
from core_plugin.adapters.trained import saved_modules, token_rows
from core_plugin.adapters.tree import Site, Sites
from core_plugin.params import near

ALL_LINEAR = "all-linear"


@dataclasses.dataclass
class Choice:
    """What a method's parameters mean in a model."""

    params: Any
    """The parameters, with the architecture's defaults in place of None."""
    targets: list[Site]
    """The modules that get an adapter."""
    parameters: list[tuple[Site, str]]
    """The parameters that get one: the module that owns it, and its name there."""
    saved: list[Site]
    """The modules that are trained whole."""
    tokens: list[tuple[Site, list[int]]]
    """The modules of which some rows are trained, and which."""
    faults: list[str]
    """What is wrong; each begins with ``peft.<field>: ``."""
    warnings: list[str]
    """What may not be meant; each begins so too."""
    changed: Mapping[Place, Any]
    """The parameters at the places where a pattern changes them."""

    def params_of(self, site: Site, parameter: str | None = None) -> Any:
        """The parameters for a module, or for one of its own; equal ones are one object."""
        place = site if parameter is None else (site, parameter)
        return self.changed.get(place, self.params)


class Modules(Names[Site]):
    """A model's modules by their paths, which are not all made for a few names."""

    def __init__(self, model_sites: Sites) -> None:
        super().__init__((path, site) for site in model_sites for path in site.paths)
        self._sites = model_sites

    def called(self, name: str) -> Sequence[tuple[str, Site]]:
        """See :meth:`Names.called`."""
        found = dict.fromkeys(self._sites.called.get(name, ()))
        paths = ((path, site) for site in found for path in site.paths)
        return [pair for pair in paths if pair[0].rpartition(".")[2] == name]

    def in_order(self, chosen: Iterable[Site]) -> list[Site]:
        """See :meth:`Names.in_order`."""
        wanted = set(chosen)
        return [site for site in self._sites if site in wanted] if wanted else []


def choose(
    model_sites: Sites,
    params: Any,
    patterns: Mapping[str, str],
    defaults: Mapping[str, Any],
) -> Choice:
    """Find all that a method's parameters name in a model, and what is wrong with them.

    Exclusion comes first; then, what is inside a module that is trained whole gets no adapter;
    then come the blocks that are asked for. All three go for a module's own parameters too.

    Args:
        model_sites: The model's modules.
        params: The method's ``Params``, a :class:`core_plugin.types.peft.PeftParams`.
        patterns: See :attr:`core_plugin.types.peft.BasePeft.patterns`.
        defaults: What the architecture says of parameters that are None.
    """
    report = Report()
    written = [pattern for pattern in patterns if getattr(params, pattern, None) is not None]
    params = _with_defaults(params, defaults, report)
    modules = Modules(model_sites)
    saved = saved_modules(modules, params, report)
    tokens = token_rows(model_sites, modules, params, saved, report)
    taken = {site: "has rows that are trained (trainable_token_indices)" for site, _ in tokens}
    taken |= dict.fromkeys(saved, "is trained whole (modules_to_save or task_type)")
    selection = Selection(modules, params, taken, saved, report)
    targets = _targets(model_sites, modules, params, selection)
    parameters = _parameters(model_sites, params, selection)
    selection.blocks.check()
    _check_both(targets, parameters, report)
    if not (targets or parameters or saved or tokens or report.faults):
        report.fault("target_modules", "is empty, so nothing would be trained")
    places = Names(_places(targets, parameters), "target")
    changed = changed_params(params, patterns, places, written, report)
    return Choice(
        params, targets, parameters, saved, tokens, report.faults, report.warnings, changed
    )


def _with_defaults(params: Any, defaults: Mapping[str, Any], report: Report) -> Any:
    fields = [f.name for f in dataclasses.fields(params) if getattr(params, f.name) is None]
    values = {name: defaults[name] for name in fields if defaults.get(name) is not None}
    if not values:
        return params
    try:
        return dataclasses.replace(params, **values)
    except ValueError as error:
        report.fault(next(iter(values)), f"the architecture's default does not fit: {error}")
        return params


def _check_both(
    targets: Sequence[Site], parameters: Sequence[tuple[Site, str]], report: Report
) -> None:
    """Check that no module and one of its parameters get an adapter both."""
    own = {site: f"{site.path}.{name}" for site, name in parameters}
    if both := [own[site] for site in targets if site in own] if own else []:
        text = f"{some(both)}: its module is one of target_modules too; exclude that, or choose"
        report.fault("target_parameters", text)


def _places(
    targets: Sequence[Site], parameters: Sequence[tuple[Site, str]]
) -> Iterator[tuple[str, Place]]:
    for site in targets:
        for path in site.paths:
            yield path, site
    for site, name in parameters:
        for path in site.paths:
            yield f"{path}.{name}", (site, name)


def _targets(
    model_sites: Sites, modules: Names[Site], params: Any, selection: Selection
) -> list[Site]:
    rule: Rule | None = params.target_modules
    if rule is None:
        rule = [] if getattr(params, "target_parameters", None) else ALL_LINEAR
    if isinstance(rule, str) and rule.lower() == ALL_LINEAR:
        linear = [(path, site) for site in linear_layers(model_sites) for path in site.paths]
        return selection.of_kind("target_modules", rule, linear)
    hits = modules.match(rule)
    unmatched = without_hits(hits)
    missing = []
    if unmatched and hasattr(params, "target_parameters"):
        parameters = Names(_own_parameters(model_sites, least=1)).match(unmatched)
        wrong = [entry for entry in unmatched if parameters[entry]]
        unmatched = [entry for entry in unmatched if entry not in wrong]
        missing = [f"{e!r} is a parameter and no module; see target_parameters" for e in wrong]
    missing += modules.missing(rule, unmatched)
    if missing and isinstance(rule, str) and near(rule.lower(), [ALL_LINEAR]):
        missing = [f"{rule!r} matches no module; did you mean {ALL_LINEAR}?"]
    return modules.in_order(selection.of("target_modules", hits, missing))


def _parameters(model_sites: Sites, params: Any, selection: Selection) -> list[tuple[Site, str]]:
    rule: Rule = getattr(params, "target_parameters", None) or []
    if not rule:
        return []
    names = Names(_own_parameters(model_sites, least=2), "parameter")
    hits = names.match(rule)
    unfit = Names(_unfit_parameters(model_sites)).match(rule)
    wrong = {e: found[0] for e, found in unfit.items() if found and not hits[e]}
    missing = [f"{path} {why}" for path, why in wrong.values()]
    missing += names.missing(rule, [e for e in without_hits(hits) if e not in wrong])
    return names.in_order(selection.of("target_parameters", hits, missing))


def _own_parameters(
    model_sites: Sequence[Site], least: int
) -> Iterator[tuple[str, tuple[Site, str]]]:
    """The parameters with so many dimensions at least, by their paths."""
    for site in model_sites:
        for name, parameter in site.base._parameters.items():
            if parameter is not None and parameter.ndim >= least:
                for path in site.paths:
                    yield f"{path}.{name}", (site, name)


def _unfit_parameters(model_sites: Sites) -> Iterator[tuple[str, str]]:
    """The parameters that can have no adapter, and why."""
    for path, (site, name) in _own_parameters(model_sites, least=0):
        if site.base._parameters[name].ndim < 2:  # type: ignore[union-attr]
            yield path, "has fewer than two dimensions"
    for name in model_sites.model._parameters:
        yield name, "is the model's own; only those of the modules in it can have an adapter"

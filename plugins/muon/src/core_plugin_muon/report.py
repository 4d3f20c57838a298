"""What an optimizer does with each parameter, and what a step costs, as tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core_plugin_muon.exchange import Exchange, Replicated, Sharded
from core_plugin_muon.matrices import matrices_of
from core_plugin_muon.newton_schulz import flops, update_scale, working_dtype
from core_plugin_muon.teams import Member, Team, coefficients_of, plan_members

if TYPE_CHECKING:
    from core_plugin_muon.optimizer import Muon

Row = dict[str, object]


def describe(optimizer: Muon, world_size: int | None = None) -> list[Row]:
    """A row for each parameter, in the order of the model if the optimizer was made for one.

    Args:
        optimizer: the optimizer; its parameters may be on `meta`.
        world_size: as for `Muon.describe_parameters`.

    Returns:
        Rows with the keys parameter, shape (global), optimizer, reason, scale (of Muon's update),
        lr, decay, owner (the ranks that orthogonalize its matrices, of those that share them out,
        or "each"), dtype (that they iterate in; "auto" on `meta`, where the device of the run is
        not known), and GFLOP (of one orthogonalization). What does not apply is None.
    """
    return _rows(optimizer, *_teams(optimizer, world_size))


def format_report(optimizer: Muon, world_size: int | None = None) -> str:
    """A table of what becomes of each parameter, and below it what a step takes in all.

    Args:
        optimizer: as for `describe`.
        world_size: as for `Muon.describe_parameters`.
    """
    teams, others = _teams(optimizer, world_size)
    rows = _rows(optimizer, teams, others)
    return "\n".join([*_table(rows), *_totals(optimizer, teams, others)])


def _teams(optimizer: Muon, world_size: int | None) -> tuple[list[Team], list[Member]]:
    if world_size is None:
        return optimizer.teams()
    alike: dict[torch.dtype, list[Member]] = defaultdict(list)
    for _, parameter, group in _named(optimizer):
        if group["algorithm"] == "muon":
            dtype = working_dtype(group["ns_dtype"], parameter.device)
            alike[dtype].append((parameter, group))
    cap = optimizer._bucket_cap_mb
    plans = {
        dtype: plan_members(members, dtype, world_size, sharded=True, bucket_cap_mb=cap)
        for dtype, members in alike.items()
    }
    return [Team(tuple(alike[dtype]), dtype, Sharded(plan)) for dtype, plan in plans.items()], []


def _named(optimizer: Muon) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    for index, group in enumerate(optimizer.param_groups):
        numbered = [f"{number} of group {index}" for number in range(len(group["params"]))]
        names = group.get("param_names", numbered)
        yield from ((name, p, group) for name, p in zip(names, group["params"], strict=True))


def _rows(optimizer: Muon, teams: Sequence[Team], others: Sequence[Member]) -> list[Row]:
    work = {id(p): (owner, flop / 1e9) for p, owner, flop in _work(teams, others)}
    rows: list[Row] = []
    for name, parameter, group in _named(optimizer):
        algorithm = group["algorithm"]
        stepped = algorithm != "skip"
        owner, gigaflop = work.get(id(parameter), (None, None))
        row: Row = {
            "parameter": name,
            "shape": tuple(parameter.shape),
            "optimizer": algorithm,
            "reason": optimizer.reasons.get(name, "its group says so"),
            "scale": _scale(parameter, group) if algorithm == "muon" else None,
            "lr": float(group["lr"]) if stepped else None,
            "decay": float(group["weight_decay"]) if stepped else None,
            "owner": owner,
            "dtype": _dtype(parameter, group) if algorithm == "muon" else None,
            "GFLOP": gigaflop,
        }
        rows.append(row)
    order = {name: place for place, name in enumerate(optimizer.reasons)}
    return sorted(rows, key=lambda row: order.get(str(row["parameter"]), len(order)))


def _dtype(parameter: Tensor, group: Mapping[str, Any]) -> str:
    if group["ns_dtype"] == "auto" and parameter.is_meta:
        return "auto"
    return str(working_dtype(group["ns_dtype"], parameter.device)).removeprefix("torch.")


def _scale(parameter: Tensor, group: Mapping[str, Any]) -> float | str:
    """The factor on the update; where the matrices have several, the least and the greatest."""
    matrices = matrices_of(0, parameter.shape, group["flatten"], group["split"])
    scales = [update_scale(group["adjust_lr_fn"], *matrix.shape) for matrix in matrices]
    low, high = min(scales), max(scales)
    return low if low == high else f"{low:.4g} to {high:.4g}"


def _work(teams: Sequence[Team], others: Sequence[Member]) -> Iterator[tuple[Tensor, str, int]]:
    """Each of Muon's parameters with who orthogonalizes it, and with the operations of that."""
    for team in teams:
        plan = team.exchange.plan
        owners: dict[int, set[int]] = defaultdict(set)
        costs: Counter[int] = Counter()
        for matrix, owner, cost in zip(plan.matrices, plan.owners, plan.costs, strict=True):
            owners[matrix.parameter].add(owner)
            costs[matrix.parameter] += cost
        for number, (parameter, _) in enumerate(team.members):
            yield parameter, _ranges(owners[number]), costs[number]
    for parameter, group in others:
        dtype = working_dtype(group["ns_dtype"], parameter.device)
        matrices = matrices_of(0, parameter.shape, group["flatten"], group["split"])
        cost = sum(flops(matrix.shape, coefficients_of(group), dtype) for matrix in matrices)
        yield parameter, "each", cost


def _ranges(ranks: Iterable[int]) -> str:
    """0, 1, 2 and 5 are `0-2,5`."""
    runs = groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0])
    spans = [[rank for _, rank in run] for _, run in runs]
    return ",".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)


def _totals(optimizer: Muon, teams: Sequence[Team], others: Sequence[Member]) -> Iterator[str]:
    counts: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for _, parameter, group in _named(optimizer):
        counts[group["algorithm"]] += 1
        elements[group["algorithm"]] += parameter.numel()
    for algorithm, count in counts.items():
        yield f"{algorithm}: {count} tensors, {elements[algorithm]:,} parameters"
    dtypes = {
        "float32 (auto: the device of the run decides)"
        if (dtype := _dtype(parameter, group)) == "auto"
        else f"{dtype} on {parameter.device.type}"
        for _, parameter, group in _named(optimizer)
        if group["algorithm"] == "muon"
    }
    total = sum(flop for _, _, flop in _work(teams, others)) / 1e9
    where = " and ".join(sorted(dtypes))
    yield f"orthogonalization: {total:.4g} GFLOP a step" + (where and f", in {where}")
    for team in teams:
        if team.exchange.plan.world_size > 1:
            yield _shared(team)
    if others:
        yield f"each rank orthogonalizes {len(others)} tensors whole, not lying there in rows"


def _shared(team: Team) -> str:
    """How evenly the ranks of a team share the work, and what that makes them send."""
    plan = team.exchange.plan
    busiest = max(plan.loads) * plan.world_size / (sum(plan.loads) or 1)
    sent = _elements_sent(team.exchange) * team.dtype.itemsize
    return (
        f"{plan.world_size} ranks: the busiest computes {busiest:.2f} times an equal share, and "
        f"none sends more than {sent / 1e6:.4g} MB a step"
    )


def _elements_sent(exchange: Exchange) -> int:
    """The most that a rank sends in a step."""
    plan = exchange.plan
    if isinstance(exchange, Replicated):  # every rank its share, filled up, to every other
        largest = (
            max(sum(plan.matrices[n].rows * plan.matrices[n].columns for n in own) for own in share)
            for share in plan.shares
        )
        return sum(largest) * (plan.world_size - 1)
    sent: Counter[int] = Counter()
    for matrix, owner in zip(plan.matrices, plan.owners, strict=True):
        end = matrix.start + matrix.rows
        first, last = (row // matrix.chunk if matrix.rows else 0 for row in (matrix.start, end - 1))
        for rank in range(first, last + 1):
            if rank != owner:
                held = len(matrix.on_rank(rank)) * matrix.columns
                sent[rank] += held
                sent[owner] += held
    return max(sent.values(), default=0)


def _table(rows: Sequence[Row]) -> list[str]:
    """Lines of a table, numbers on the right."""
    titles = list(rows[0]) if rows else []
    cells = [titles, *([_cell(row[title]) for title in titles] for row in rows)]
    numbers = {
        column
        for column, title in enumerate(titles)
        if all(isinstance(row[title], float | None) for row in rows)
    }
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (cells if rows else [])
    ]


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""Parameters whose matrices the same ranks share out, and the course of their orthogonalization."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core_plugin_muon.coefficients import Triple, schedule
from core_plugin_muon.exchange import Exchange, Sharded, agree
from core_plugin_muon.layout import exchange_of, local_part
from core_plugin_muon.matrices import matrices_of
from core_plugin_muon.newton_schulz import flops, orthogonalize, working_dtype
from core_plugin_muon.options import OPTIONS
from core_plugin_muon.plan import Plan, make_plan

Member = tuple[Tensor, dict[str, Any]]
"""A parameter and the group that it is in."""

_MB = 2**20


@dataclass(frozen=True)
class Team:
    """Parameters on one device that the same ranks work on, in one dtype.

    Attributes:
        members: the parameters, in the order that the plan numbers them in.
        dtype: of the iterations, and of all that is exchanged.
        exchange: between the ranks.
    """

    members: tuple[Member, ...]
    dtype: torch.dtype
    exchange: Exchange

    def updates(
        self, direction: Callable[[int, range], Tensor | None]
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Orthogonalize all matrices; while one bucket is computed, its neighbours travel.

        Args:
            direction: gives rows, on this rank, of what a parameter is to be moved along; each
                of shape (count, columns) and of the team's dtype, or None for zeros.

        Yields:
            The number of a matrix, its first row on this rank, and this rank's rows of the result,
            where there are any; without matrices that are known to be zeros.
        """
        like = local_part(self.members[0][0]).detach().new_empty(0, dtype=self.dtype)
        plan = self.exchange.plan

        def rows(number: int) -> Tensor | None:
            return direction(plan.matrices[number].parameter, self.exchange.held(number))

        arriving = self.exchange.gather(0, rows, like)
        returning: Callable[[], dict[int, Tensor]] = dict
        for bucket in range(len(plan.buckets)):
            matrices = arriving()
            if bucket + 1 < len(plan.buckets):
                arriving = self.exchange.gather(bucket + 1, rows, like)
            results = self._orthogonalized(matrices)
            del matrices
            yield from self._arrived(returning())
            returning = self.exchange.scatter(bucket, results, like)
            del results
        yield from self._arrived(returning())

    def _orthogonalized(self, matrices: Mapping[int, Tensor]) -> dict[int, Tensor]:
        alike: dict[tuple[tuple[Triple, ...], float], list[int]] = defaultdict(list)
        for number in matrices:
            _, group = self.members[self.exchange.plan.matrices[number].parameter]
            alike[coefficients_of(group), group["eps"]].append(number)
        results: dict[int, Tensor] = {}
        for (coefficients, eps), numbers in alike.items():
            chosen = [matrices[number] for number in numbers]
            done = orthogonalize(chosen, coefficients, self.dtype, eps)
            results.update(zip(numbers, done, strict=True))
        return results

    def _arrived(self, results: Mapping[int, Tensor]) -> Iterator[tuple[int, int, Tensor]]:
        for number, result in results.items():
            if rows := self.exchange.held(number):
                yield number, rows.start, result


def make_teams(
    members: Iterable[Member], process_group: dist.ProcessGroup | None, bucket_cap_mb: float
) -> tuple[list[Team], list[Member]]:
    """Put parameters together that the same ranks work on in one dtype, on one device.

    Args:
        members: parameters and their groups, in the same order on all ranks.
        process_group: the ranks that hold the same plain parameters.
        bucket_cap_mb: as for `plan_members`.

    Returns:
        The teams, and the parameters that lie in a layout that ranks cannot share out.
    """
    alike: dict[Any, list[Member]] = defaultdict(list)
    others = []
    for parameter, group in members:
        how = exchange_of(parameter, process_group)
        if how is None:
            others.append((parameter, group))
        else:
            dtype = working_dtype(group["ns_dtype"], parameter.device)
            alike[*how, dtype, parameter.device].append((parameter, group))
    teams = [_make_team(tuple(alike[key]), bucket_cap_mb, *key[:-1]) for key in alike]
    return teams, others


def agree_on(teams: Iterable[Team]) -> None:
    """Make sure that all ranks have the same plans, in one exchange for each process group.

    Names and options of the parameters are compared, too, as they are at this time. A rank that
    has nothing to share out with the others does not take part, and they wait for it.

    Raises:
        RuntimeError: as `agree` does.
    """
    of_group = defaultdict(list)
    for team in teams:
        if team.exchange.group is not None:
            of_group[team.exchange.group].append(team)
    for ranks, its in of_group.items():
        terms = [_terms(team) for team in its]
        agree(terms, ranks, like=local_part(its[0].members[0][0]))


def _terms(team: Team) -> object:
    """What is to be the same on all ranks."""
    groups = {id(group): group for _, group in team.members}
    names = {
        id(parameter): name
        for group in groups.values()
        for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    options = {key: _options(group) for key, group in groups.items()}
    members = [(names.get(id(p)), options[id(group)]) for p, group in team.members]
    return team.dtype, team.exchange.plan, members


def _options(group: Mapping[str, Any]) -> list[object]:
    """Alike whether a number is in a tensor, and a sequence a list."""
    special = {"ns_coefficients": coefficients_of(group), "split": tuple(group["split"])}
    numbers = {key: float(group[key]) for key in ("lr", "weight_decay", "momentum", "eps")}
    return [(key, {**group, **special, **numbers}[key]) for key in OPTIONS["muon"]]


def _make_team(
    members: tuple[Member, ...],
    bucket_cap_mb: float,
    exchange: type[Exchange],
    group: dist.ProcessGroup | None,
    dtype: torch.dtype,
) -> Team:
    plan = plan_members(
        members,
        dtype,
        1 if group is None else dist.get_world_size(group),
        sharded=exchange is Sharded,
        bucket_cap_mb=bucket_cap_mb,
    )
    rank = 0 if group is None else dist.get_rank(group)
    return Team(members, dtype, exchange(plan, rank, group))


def coefficients_of(group: Mapping[str, Any]) -> tuple[Triple, ...]:
    """The coefficients of each Newton-Schulz step of a group."""
    return schedule(group["ns_coefficients"], group["ns_steps"])


def plan_members(
    members: Iterable[Member],
    dtype: torch.dtype,
    world_size: int,
    *,
    sharded: bool,
    bucket_cap_mb: float,
) -> Plan:
    """Plan the matrices of some parameters.

    Args:
        members: the parameters and their groups.
        dtype: dtype of the iterations.
        world_size: number of ranks.
        sharded: the ranks hold rows of the parameters; otherwise whole ones.
        bucket_cap_mb: size of a rank's part of a bucket, about.
    """
    matrices, costs = [], []
    for number, (parameter, group) in enumerate(members):
        shards = world_size if sharded else 1
        for matrix in matrices_of(
            number, parameter.shape, group["flatten"], group["split"], shards
        ):
            matrices.append(matrix)
            costs.append(flops(matrix.shape, coefficients_of(group), dtype))
    return make_plan(
        matrices,
        costs,
        world_size,
        sharded=sharded,
        bucket_elements=max(1, int(bucket_cap_mb * _MB) // dtype.itemsize),
    )

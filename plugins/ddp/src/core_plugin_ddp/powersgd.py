"""PowerSGD whose state is kept by parameter, so that a run can go on from a checkpoint.

torch keeps it by bucket. After every start its buckets are laid out anew once, after the first
exchange, and another number of ranks has no place for what each rank kept for itself.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from core_plugin.errors import ConfigError
from core_plugin.tensors import canonical_name

LAYOUTS = 2
"""How many exchanges after a start may have buckets of their own."""
EPSILON = 1e-30
"""Keeps the gradients of what a step does not use from being divided by their norm, 0."""


@dataclass
class Memory:
    """What is carried from one exchange to the next."""

    exchanges: int = 0
    errors: dict[str, Tensor] = field(default_factory=dict)
    """What compression has left out on this rank, by parameter: flat."""
    projections: dict[str, Tensor] = field(default_factory=dict)
    """The right factor of the last approximation, the same on all ranks, by parameter."""


class PowerSGD:
    """The compression of one model's gradients.

    Raises:
        ConfigError: The model trains a scalar, which torch's PowerSGD cannot handle.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, rank: int, start_step: int
    ) -> None:
        self._names = {id(p): canonical_name(n) for n, p in model.named_parameters()}
        scalars = [n for n, p in model.named_parameters() if p.requires_grad and not p.ndim]
        if scalars:
            raise ConfigError(
                f"distributed.compression is powersgd, which cannot handle scalars, and the model "
                f"trains {', '.join(scalars)}; freeze them, give them the shape [1], or choose "
                "another compression"
            )
        self._state = PowerSGDState(group, rank, start_step, orthogonalization_epsilon=EPSILON)
        self._buckets: dict[int, list[Tensor]] = {}
        """The parameters in each bucket that torch's state has memory for."""
        self._first: dict[int, list[Tensor]] = {}
        """What the projections of each bucket begin with."""
        self._loose = Memory()
        """What is not in torch's state."""
        self._exchanges_since_start = 0

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket of gradients over the ranks, approximately from the start step on."""
        if bucket.index() == 0 and self._exchanges_since_start < LAYOUTS:
            self._loose = self._memory()
            self._forget_buckets()
        self._exchanges_since_start += bucket.is_last()
        compresses = self._state.iter >= self._state.start_powerSGD_iter
        if compresses and bucket.index() not in self._buckets:
            self._lay_out(bucket.index(), bucket.parameters(), bucket.buffer())
        if compresses:
            self._revive_projections(bucket.index())
        exchanged = powerSGD_hook(self._state, bucket)
        if not bucket.buffer().is_cuda:
            # It sends more when something has come, whichever bucket that is of. CUDA's futures do
            # so in the order of the calls; elsewhere ranks would mistake one bucket for another.
            exchanged.wait()
        return exchanged

    def _forget_buckets(self) -> None:
        for memory in (
            self._buckets,
            self._first,
            self._state.error_dict,
            self._state.p_memory_dict,
            self._state.q_memory_dict,
        ):
            memory.clear()

    def _lay_out(self, index: int, parameters: list[Tensor], gradients: Tensor) -> None:
        """Give torch's state its memory for a bucket, with what is known of its parameters."""
        self._buckets[index] = parameters
        matrices = self._compressed(parameters)
        self._first[index] = [self._first_projection(p).to(gradients) for p in matrices]
        errors = [self._loose.errors.pop(self._name(p), torch.zeros(p.numel())) for p in parameters]
        projections = [
            self._loose.projections.pop(self._name(p), first)
            for p, first in zip(matrices, self._first[index], strict=True)
        ]
        rows = sum(p.shape[0] * self._rank_of(p) for p in matrices)
        self._state.error_dict[index] = _joined(errors, gradients)
        self._state.p_memory_dict[index] = gradients.new_empty(rows)
        self._state.q_memory_dict[index] = _joined(projections, gradients)

    def _revive_projections(self, index: int) -> None:
        """Begin anew where a gradient was of a lower rank, or zero: it would be so for ever."""
        firsts = self._first[index]
        parts = self._state.q_memory_dict[index].split([first.numel() for first in firsts])
        for part, first in zip(parts, firsts, strict=True):
            projection = part.view_as(first)
            lost = (projection == 0).all(0)
            projection.copy_(torch.where(lost, first, projection))

    def _name(self, parameter: Tensor) -> str:
        return self._names[id(parameter)]

    def _compressed(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Those of a bucket that are approximated, in torch's order: by shape."""
        by_shape: dict[tuple[int, int], list[Tensor]] = {}
        for parameter in parameters:
            rows, columns = _matrix(parameter)
            size = (rows + columns) * self._rank_of(parameter) * self._state.min_compression_rate
            if size < rows * columns:
                by_shape.setdefault((rows, columns), []).append(parameter)
        return [parameter for of_shape in by_shape.values() for parameter in of_shape]

    def _rank_of(self, parameter: Tensor) -> int:
        rank: int = self._state.matrix_approximation_rank
        return min(*_matrix(parameter), rank)

    def _first_projection(self, parameter: Tensor) -> Tensor:
        """Random, by the name alone: the same on all ranks, in whatever bucket."""
        digest = hashlib.sha256(self._name(parameter).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randn(_matrix(parameter)[1], self._rank_of(parameter), generator=generator)

    def _memory(self) -> Memory:
        """All that is kept now, by parameter."""
        memory = Memory(self._state.iter, dict(self._loose.errors), dict(self._loose.projections))
        for index, parameters in self._buckets.items():
            sizes = [p.numel() for p in parameters]
            parts = self._state.error_dict[index].split(sizes)
            memory.errors |= {self._name(p): e for p, e in zip(parameters, parts, strict=True)}
            matrices = self._compressed(parameters)
            sizes = [_matrix(p)[1] * self._rank_of(p) for p in matrices]
            parts = self._state.q_memory_dict[index].split(sizes)
            memory.projections |= {self._name(p): q for p, q in zip(matrices, parts, strict=True)}
        return memory

    # Checkpoints

    def stage(self) -> Callable[[Path], None]:
        """Copy what is kept to the host; the result writes this rank's file into a directory."""
        memory = self._memory()
        content = {
            "rank": self._state.matrix_approximation_rank,
            "exchanges": memory.exchanges,
            "errors": _on_host(memory.errors),
            "projections": _on_host(memory.projections),
        }
        file = f"powersgd-{dist.get_rank(self._state.process_group):05d}.pt"
        return lambda directory: torch.save(content, directory / file)

    def load(self, directory: Path) -> None:
        """Go on from what :meth:`stage` wrote on some number of ranks, if it was.

        Each of another number of ranks takes the mean of what was left out, so that the sum over
        the ranks corrects their average by as much. The approximation starts anew if its rank is
        another one.
        """
        files = sorted(directory.glob("powersgd-*.pt"))
        if not files:
            return
        group = self._state.process_group
        mine = [files[group.rank()]] if len(files) == group.size() else files
        saved = [torch.load(file, weights_only=True, map_location="cpu") for file in mine]
        kept = saved[0]["rank"] == self._state.matrix_approximation_rank
        self._forget_buckets()
        self._exchanges_since_start = 0
        self._state.iter = saved[0]["exchanges"]
        self._loose = Memory(
            saved[0]["exchanges"],
            _mean([one["errors"] for one in saved]),
            saved[0]["projections"] if kept else {},
        )


def _matrix(parameter: Tensor) -> tuple[int, int]:
    """The rows and columns of the matrix that torch makes of a parameter."""
    return parameter.shape[0], parameter.numel() // max(parameter.shape[0], 1)


def _joined(parts: Iterable[Tensor], like: Tensor) -> Tensor:
    return torch.cat([like.new_empty(0), *(part.flatten().to(like) for part in parts)])


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _mean(of_ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in of_ranks]).mean(0) for name in of_ranks[0]}

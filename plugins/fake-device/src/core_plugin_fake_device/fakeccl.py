"""The collective library ``fakeccl``: torch.distributed for tensors on the fake device.

A vendor has a library of its own, and derives from ``torch.distributed.Backend`` in C++. This is a
process group in Python around gloo, which is given CPU tensors over the device's memory. Everything
runs as gloo runs it: asynchronously, with gloo's timeouts and gloo's errors.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.futures import Future, collect_all

NAME = "fakeccl"
TRACE = "FAKECCL_TRACE"
"""The environment variable with the directory where every process writes its calls."""

Nested = Tensor | list[Tensor] | list[list[Tensor]]


def register() -> None:
    """Make torch.distributed know the library, as the one of the device and able to do the CPU."""
    dist.Backend.register_backend(NAME, FakeGroup, devices=["fake", "cpu"])


# ---- What was asked for, for tests. --------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of the library."""

    operation: str
    reduce_op: str
    """SUM, AVG, ...; ``-`` where nothing is reduced."""
    device: str
    bytes: int
    """Of the tensors that this rank gives, or gets if it gives none."""

    def __str__(self) -> str:
        return f"{self.operation} {self.reduce_op} {self.device} {self.bytes}"


calls: list[Call] = []
"""The calls of this process, in their order. ``calls.clear()`` begins anew."""


def _record(operation: str, tensors: list[Tensor], op: dist.ReduceOp | None = None) -> None:
    device = str(tensors[0].device) if tensors else "-"
    call = Call(operation, _op_name(op), device, sum(t.nbytes for t in tensors))
    calls.append(call)
    if directory := os.environ.get(TRACE):
        with Path(directory, f"rank-{dist.get_rank()}.txt").open("a", encoding="utf-8") as file:
            file.write(f"{call}\n")


def _op_name(op: dist.ReduceOp | None) -> str:
    if op is None:
        return "-"
    return next((name for name in OPS if op == getattr(dist.ReduceOp, name)), "PREMUL_SUM")


# ---- What can be reduced. ------------------------------------------------------------------------

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def _check_op(op: dist.ReduceOp, tensors: list[Tensor]) -> None:
    """Refuse what gloo cannot do, and what is switched off."""
    name = _op_name(op)
    if name == "AVG":
        torch.ops.fake_device.require("average_in_collectives")
        if not all(t.is_floating_point() or t.is_complex() for t in tensors):
            raise TypeError(
                f"{NAME}: ReduceOp.AVG needs floating-point numbers, got {tensors[0].dtype}; use "
                "ReduceOp.SUM and divide"
            )
    if name == "PREMUL_SUM":
        raise NotImplementedError(
            f"{NAME}: ReduceOp.PREMUL_SUM is not supported; multiply, and use ReduceOp.SUM"
        )


# ---- Tensors and results. ------------------------------------------------------------------------


# gloo goes through memory from its start, whatever a tensor's strides are.


def _host(tensors: Any) -> Any:
    """CPU tensors over the same memory, in the same nested lists."""
    if isinstance(tensors, Tensor):
        on_device = tensors.device.type == "fake"
        return torch.ops.fake_device.host_alias(tensors) if on_device else tensors
    return [_host(tensor) for tensor in tensors]


def _sources(tensors: Any) -> Any:
    """CPU tensors to read from."""
    if isinstance(tensors, Tensor):
        return _host(tensors.contiguous())
    return [_sources(tensor) for tensor in tensors]


def _targets(tensors: Any) -> Any:
    """CPU tensors to write to."""
    if isinstance(tensors, Tensor):
        _require(tensors.is_contiguous(), tensors)
        return _host(tensors)
    return [_targets(tensor) for tensor in tensors]


def _in_place(tensors: list[Tensor]) -> Any:
    """CPU tensors to read from and write to, with the same strides on all ranks."""
    for tensor in tensors:
        _require(torch.ops.aten.is_non_overlapping_and_dense(tensor), tensor)
    return _host(tensors)


def _require(fits: bool, tensor: Tensor) -> None:
    if not fits:
        raise ValueError(
            f"{NAME}: cannot write to a tensor of the shape {tuple(tensor.shape)} with the strides "
            f"{tensor.stride()}; pass tensor.contiguous(), and copy the result back"
        )


class FakeWork(dist.Work):
    """Something that gloo is doing.

    Args:
        works: gloo's part.
        result: The device tensors that hold the outcome when it is done.
        finish: What is left to do then.
    """

    def __init__(
        self, works: list[dist.Work], result: Nested, finish: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._works = works
        self._result = [result] if isinstance(result, Tensor) else result
        self._finish = finish
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it is done.

        Raises:
            RuntimeError: gloo's error, such as a peer that died; every later call raises it too.
        """
        for work in self._works:
            if timeout > timedelta(0):
                work.wait(timeout)
            else:
                work.wait()
        self._done()
        return True

    def _done(self) -> None:
        """Do what is left, once. Whoever comes meanwhile waits for it."""
        with self._lock:
            finish, self._finish = self._finish, None
            try:
                if finish:
                    finish()
            except BaseException as error:
                self._error = error
            if self._error:
                raise self._error

    def get_future(self) -> Future[Any]:
        """The result, when it is done: a list of tensors on the device."""
        parts: Future[Any] = collect_all([work.get_future() for work in self._works])
        return parts.then(self._collect)

    def _collect(self, parts: Future[list[Future[Any]]]) -> Nested:
        for part in parts.value():
            part.value()  # raises gloo's error
        self._done()
        return self._result

    def is_completed(self) -> bool:
        """Whether it is done, in success or failure, without waiting for other ranks."""
        if not all(work.is_completed() for work in self._works):
            return False
        with suppress(Exception):  # wait() raises it again
            self.wait()
        return True

    def is_success(self) -> bool:
        """Whether it was done without an error."""
        return self.is_completed() and not self._error and all(w.is_success() for w in self._works)

    def exception(self) -> Any:
        """The error, if there was one."""
        return self._error or next((e for e in (w.exception() for w in self._works) if e), None)

    def result(self) -> Any:
        """The tensors on the device."""
        return self._result

    def synchronize(self) -> None:
        """Let the current stream wait: it does so by itself."""
        self.wait()

    def source_rank(self) -> int:
        """Who sent what was received from anyone."""
        return self._works[0]._source_rank()

    _source_rank = source_rank


# ---- The process group. --------------------------------------------------------------------------


ProcessGroup: Any = dist.ProcessGroup  # its type stubs do not fit what may be overridden


class FakeGroup(ProcessGroup):  # type: ignore[misc]
    """A process group for tensors on the device, and on the CPU.

    torch calls the methods by these names, from Python or from C++.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        # Lets torch's own part keep the group's name and set timeouts.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._started: list[dist.Work] | None = None

    def getBackendName(self) -> str:  # noqa: N802
        """What torch prints."""
        return NAME

    def _work(
        self, works: list[dist.Work], result: Nested, finish: Callable[[], None] | None = None
    ) -> FakeWork:
        work = FakeWork(works, result, finish)
        if self._started is not None:
            self._started.append(work)
        return work

    # Between these two, torch gathers the work that it then waits for as one.

    def _start_coalescing(self, device: torch.device) -> None:
        self._started = []

    def _end_coalescing(self, device: torch.device) -> FakeWork:
        started, self._started = self._started or [], None
        return FakeWork(started, [])

    # -- Reductions.

    def allreduce(self, tensors: Any, opts: Any = None) -> FakeWork:
        """Reduce each tensor over the ranks, in place."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = opts or dist.AllreduceOptions()
        _check_op(opts.reduceOp, tensors)
        _record("all_reduce", tensors, opts.reduceOp)
        return self._work([self._gloo.allreduce(_in_place(tensors), opts)], tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> FakeWork:
        """As :meth:`allreduce`, for tensors of different shapes."""
        opts = opts or dist.AllreduceCoalescedOptions()
        one = dist.AllreduceOptions()
        one.reduceOp, one.timeout = opts.reduceOp, opts.timeout
        return FakeWork([self.allreduce([tensor], one) for tensor in tensors], tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> FakeWork:
        """Reduce to one rank, in place."""
        _check_op(opts.reduceOp, tensors)
        _record("reduce", tensors, opts.reduceOp)
        return self._work([self._gloo.reduce(_in_place(tensors), opts)], tensors)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> FakeWork:
        """Reduce a list of tensors; each rank gets its own."""
        opts = opts or dist.ReduceScatterOptions()
        _check_op(opts.reduceOp, outputs)
        _record("reduce_scatter", inputs[0], opts.reduceOp)
        work = self._gloo.reduce_scatter(_targets(outputs), _sources(inputs), opts)
        return self._work([work], outputs)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> FakeWork:
        """Reduce a tensor; each rank gets its part."""
        opts = opts or dist.ReduceScatterOptions()
        _check_op(opts.reduceOp, [source])
        _record("reduce_scatter_single", [source], opts.reduceOp)
        parts = _targets(output).view(-1), _sources(source).view(-1)
        work = self._gloo._reduce_scatter_base(*parts, opts)
        return self._work([work], output)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> FakeWork:
        """As :meth:`reduce_scatter_single`, for several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return FakeWork([self.reduce_scatter_single(o, i, opts) for o, i in pairs], outputs)

    # -- Movements.

    def broadcast(self, tensors: list[Tensor], opts: Any) -> FakeWork:
        """Send one rank's tensors to all."""
        _record("broadcast", tensors)
        return self._work([self._gloo.broadcast(_in_place(tensors), opts)], tensors)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> FakeWork:
        """Give every rank the tensors of all."""
        opts = opts or AllgatherOptions()
        _record("all_gather", inputs)
        return self._work([self._gloo.allgather(_host(outputs), _sources(inputs), opts)], outputs)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> FakeWork:
        """As :meth:`allgather`, for several tensors; the outputs are listed by rank."""
        by_tensor = [list(outs) for outs in zip(*outputs, strict=True)]
        pairs = zip(by_tensor, inputs, strict=True)
        return FakeWork([self.allgather([outs], [i], opts) for outs, i in pairs], outputs)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> FakeWork:
        """Give every rank the tensors of all, as one."""
        opts = opts or AllgatherOptions()
        _record("all_gather_single", [source])
        parts = _targets(output).view(-1), _sources(source).view(-1)
        work = self._gloo._allgather_base(*parts, opts)
        return self._work([work], output)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> FakeWork:
        """As :meth:`all_gather_single`, for several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return FakeWork([self.all_gather_single(o, i, opts) for o, i in pairs], outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> FakeWork:
        """Give one rank the tensors of all."""
        _record("gather", inputs)
        return self._work([self._gloo.gather(_host(outputs), _sources(inputs), opts)], outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> FakeWork:
        """Give each rank its tensor of one rank's list."""
        _record("scatter", inputs[0] if inputs else outputs)
        return self._work([self._gloo.scatter(_targets(outputs), _sources(inputs), opts)], outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> FakeWork:
        """Give each rank its rows of every rank's tensor; equal parts if no splits are given."""
        opts = opts or dist.AllToAllOptions()
        _record("all_to_all_single", [source])
        work = self._gloo.alltoall_base(
            _targets(output), _sources(source), output_splits, input_splits, opts
        )
        return self._work([work], output)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> FakeWork:
        """Give each rank its tensor of every rank's list. gloo has it for single tensors only."""
        opts = opts or dist.AllToAllOptions()
        _record("all_to_all", inputs)
        flat_input = torch.cat([t.reshape(-1) for t in _host(inputs)])
        output_sizes, input_sizes = ([t.numel() for t in ts] for ts in (outputs, inputs))
        flat_output = flat_input.new_empty(sum(output_sizes))
        work = self._gloo.alltoall_base(flat_output, flat_input, output_sizes, input_sizes, opts)

        def finish() -> None:
            for output, part in zip(outputs, flat_output.split(output_sizes), strict=True):
                output.copy_(part.view(output.shape))

        return self._work([work], outputs, finish)

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> FakeWork:
        """Send to one rank."""
        _record("send", tensors)
        return self._work([self._gloo.send(_sources(tensors), destination, tag)], tensors)

    def recv(self, tensors: list[Tensor], origin: int, tag: int) -> FakeWork:
        """Receive from one rank."""
        _record("recv", tensors)
        return self._work([self._gloo.recv(_targets(tensors), origin, tag)], tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> FakeWork:
        """Receive from any rank."""
        _record("recv", tensors)
        return self._work([self._gloo.recv_anysource(_targets(tensors), tag)], tensors)

    def barrier(self, opts: Any = None) -> FakeWork:
        """Wait for all ranks."""
        _record("barrier", [])
        return self._work([self._gloo.barrier(opts or dist.BarrierOptions())], [])

    # The names of torch before 2.13, which some of its own code still calls.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

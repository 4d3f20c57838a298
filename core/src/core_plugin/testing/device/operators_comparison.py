"""One operator on a device and on the CPU, with torch's own samples."""

from __future__ import annotations

import functools
import itertools
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from core_plugin.errors import CorePluginError
from core_plugin.privateuse1 import DeviceCapabilities
from core_plugin.testing.device.operators_known import (
    KNOWN,
    NEEDS,
    UNDETERMINED,
    KnownDifference,
)
from core_plugin.testing.device.subject import Subject

Kind = Literal["forward", "backward"]
Outcome = Literal["equal", "different", "known", "unexpectedly equal", "crashed", "left out"]

SAMPLES = 5
CANDIDATES = 20
"""So many of an operator's samples are looked at, to find ``SAMPLES`` that can be compared."""
ELEMENTS = 20_000
"""A sample with more is not compared."""
DTYPES = (torch.float32, torch.int64, torch.complex64)
"""An operator is compared in the first of them that it takes."""
TOLERANCE = 1e-3
"""Relative and absolute; that of torch's own comparison with the CPU (``test_compare_cpu``)."""


@dataclass(frozen=True)
class OperatorResult:
    """What comparing an operator gave.

    ``known`` is a difference that is not the device's fault, and ``unexpectedly equal`` such a one
    that did not occur. The message says what differs, or why the operator was left out.
    """

    operator: str
    kind: Kind
    outcome: Outcome
    message: str = ""
    seconds: float = 0.0


def list_operators(device: torch.device, answer: Path) -> None:
    """Write the operators' names."""
    answer.write_bytes(pickle.dumps(list(_operators())))


def compare_operator(
    subject: Subject, device: torch.device, operator: str, kind: Kind, answer: Path
) -> None:
    """Write an operator's result."""
    result = _compare(_operators()[operator], kind, device, subject.capabilities)
    answer.write_bytes(pickle.dumps(result))


@functools.cache
def _operators() -> dict[str, Any]:
    """What torch knows of its operators (``OpInfo``), by their names."""
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ModuleNotFoundError as error:
        raise CorePluginError(
            f"torch's samples of operators need {error.name!r}: pip install {error.name}"
        ) from error
    return {operator.full_name: operator for operator in op_db}


class _LeftOutError(Exception):
    """An operator, or a sample, is not compared."""


def _compare(
    operator: Any, kind: Kind, device: torch.device, capabilities: DeviceCapabilities
) -> OperatorResult:
    started = time.perf_counter()
    known = _known(operator.full_name, kind) if device.type != "cpu" else None
    try:
        outcome, message = _judged(known, _difference(operator, kind, device, capabilities))
    except _LeftOutError as reason:
        outcome, message = "left out", str(reason)
    seconds = time.perf_counter() - started
    return OperatorResult(operator.full_name, kind, outcome, message, seconds)


def _known(operator: str, kind: Kind) -> KnownDifference | None:
    version = ".".join(torch.__version__.split(".")[:2])
    return KNOWN.get(version, {}).get((operator, kind))


def _judged(known: KnownDifference | None, difference: str | None) -> tuple[Outcome, str]:
    if known and difference:
        return "known", known.reason
    if known and known.always:
        return "unexpectedly equal", f"take it off the list of known differences: {known.reason}"
    return ("different", difference) if difference else ("equal", "")


def _difference(
    operator: Any, kind: Kind, device: torch.device, capabilities: DeviceCapabilities
) -> str | None:
    """What is different with the first sample that gives a difference.

    Raises:
        _LeftOutError: No sample can be compared.
    """
    compared, reason = 0, "it has no small samples"
    for sample in _samples(operator, kind, capabilities):
        try:
            expected = _expected(operator, kind, sample, capabilities)
        except _LeftOutError as error:
            reason = str(error)
            continue
        if fault := _fault(operator, kind, sample, device, expected):
            return f"{fault}; with {sample.summary()}"
        compared += 1
        if compared == SAMPLES:
            break
    if not compared:
        raise _LeftOutError(reason)
    return None


def _samples(operator: Any, kind: Kind, capabilities: DeviceCapabilities) -> Iterator[Any]:
    from torch.testing._internal.common_utils import set_rng_seed

    if reason := UNDETERMINED.get(operator.full_name):
        raise _LeftOutError(reason)
    needed = NEEDS.get(operator.full_name)
    if needed and not getattr(capabilities, needed):
        raise _LeftOutError(_undeclared(needed))
    dtype = next((dtype for dtype in DTYPES if dtype in operator.dtypes), None)
    if dtype is None:
        raise _LeftOutError(f"on the CPU it takes none of {', '.join(map(str, DTYPES))}")
    backward = kind == "backward"
    if backward and dtype not in operator.supported_backward_dtypes("cpu"):
        raise _LeftOutError("it has no gradient")
    set_rng_seed(0)
    samples = operator.sample_inputs_func(operator, "cpu", dtype, backward)
    for sample in itertools.islice(samples, CANDIDATES):
        tensors = _tensors(_values(sample))
        if sum(tensor.numel() for tensor in tensors) <= ELEMENTS:
            yield sample


def _values(sample: Any) -> tuple[Any, Any, Any]:
    return sample.input, sample.args, sample.kwargs


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _expected(
    operator: Any, kind: Kind, sample: Any, capabilities: DeviceCapabilities
) -> list[Any]:
    """What the sample gives on the CPU."""
    trace = _Trace()
    try:
        with trace:
            results = _results(operator, kind, sample, torch.device("cpu"))
    except _LeftOutError:
        raise
    except Exception as error:
        raise _LeftOutError(f"it does not run on the CPU: {_line(error)}") from error
    if reason := trace.reason_against(capabilities):
        raise _LeftOutError(reason)
    return results


class _Trace(TorchDispatchMode):
    """Which operators a computation comes to, and with which tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators: set[Any] = set()
        self._dtypes: set[torch.dtype] = set()
        self._layouts: set[torch.layout] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self._operators.add(function)
        for tensor in _tensors((args, kwargs, result)):
            self._dtypes.add(tensor.dtype)
            self._layouts.add(tensor.layout)
        return result

    def reason_against(self, capabilities: DeviceCapabilities) -> str | None:
        """Why a device need not give the same, or None if it must."""
        for operator in self._operators:
            if torch.Tag.nondeterministic_seeded in operator.tags:
                return f"it draws random numbers, with {operator}"
        if self._layouts - {torch.strided}:
            return "it has sparse tensors"
        needed = {
            "complex_numbers": any(dtype.is_complex for dtype in self._dtypes),
            "float64": torch.float64 in self._dtypes,
            "convolution": torch.ops.aten.convolution.default in self._operators,
        }
        lacking = [name for name in needed if needed[name] and not getattr(capabilities, name)]
        return _undeclared(*lacking) if lacking else None


def _undeclared(*capabilities: str) -> str:
    return f"the device does not declare {', '.join(capabilities)}"


def _results(operator: Any, kind: Kind, sample: Any, device: torch.device) -> list[Any]:
    """The results, or the gradients of all inputs that can have one."""
    values = tree_map(lambda value: _moved(value, device), _values(sample))
    if not any(isinstance(leaf, torch.Tensor | torch.device) for leaf in tree_leaves(values)):
        raise _LeftOutError("nothing of it is on a device")
    first, args, kwargs = values
    results = tree_leaves(sample.output_process_fn_grad(operator(first, *args, **kwargs)))
    if kind == "forward":
        return results
    inputs = [tensor for tensor in _tensors(values) if tensor.requires_grad]
    outputs = [tensor for tensor in _tensors(results) if tensor.requires_grad]
    if not inputs or not outputs:
        raise _LeftOutError("it has no gradient")
    gradients = [_ramp(output).to(device) for output in outputs]
    return list(torch.autograd.grad(outputs, inputs, gradients, allow_unused=True))


def _ramp(output: torch.Tensor) -> torch.Tensor:
    """A gradient for an output, on the CPU: not random, as random operators are left out."""
    ramp = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
    return ramp.to(output.dtype) * (1 + 1j if output.is_complex() else 1)


def _moved(value: Any, device: torch.device) -> Any:
    """A sample's value for a device; a tensor's storage is copied whole, and its strides kept."""
    if not isinstance(value, torch.Tensor):
        names_cpu = isinstance(value, str | torch.device) and str(value) == "cpu"
        return device if names_cpu else value
    if value.layout != torch.strided:
        raise _LeftOutError("it has sparse tensors")
    with torch.no_grad():
        storage = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
        copied = storage.to(device, copy=True)
        moved = copied.as_strided(value.size(), value.stride(), value.storage_offset())
    return moved.detach().requires_grad_(value.requires_grad)


def _fault(
    operator: Any, kind: Kind, sample: Any, device: torch.device, expected: list[Any]
) -> str | None:
    """How the sample's results on the device differ from those on the CPU."""
    try:
        actual = _results(operator, kind, sample, device)
        tolerance = _tolerance(operator, device)
        for ours, theirs in zip(actual, expected, strict=True):
            _check_same(ours, theirs, device, tolerance)
    except Exception as error:
        return f"{type(error).__name__}: {_line(error)}"
    return None


def _tolerance(operator: Any, device: torch.device) -> tuple[float, float]:
    """Relative and absolute: the operator's own, where torch's tests allow it more."""
    from torch.testing._internal.common_device_type import toleranceOverride

    decorators = operator.get_decorators(
        "TestCommon", "test_compare_cpu", device.type, torch.float32, {}
    )
    relative = absolute = TOLERANCE
    for decorator in decorators:
        if isinstance(decorator, toleranceOverride) and torch.float32 in decorator.d:
            relative = max(relative, decorator.d[torch.float32].rtol)
            absolute = max(absolute, decorator.d[torch.float32].atol)
    return relative, absolute


def _check_same(
    actual: Any, expected: Any, device: torch.device, tolerance: tuple[float, float]
) -> None:
    inexact = isinstance(expected, float | complex)
    if isinstance(actual, torch.Tensor) and actual.device.type != device.type:
        raise AssertionError(f"a result is on {actual.device}")
    if isinstance(expected, torch.Tensor):
        inexact = expected.is_floating_point() or expected.is_complex()
    relative, absolute = tolerance if inexact else (0, 0)
    torch.testing.assert_close(
        actual, expected, rtol=relative, atol=absolute, equal_nan=True, check_device=False
    )


def _line(error: Exception) -> str:
    """An exception's message in one line."""
    return " ".join(str(error).split())

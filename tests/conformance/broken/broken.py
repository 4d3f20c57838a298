"""The fake device with one fault, chosen by its parameter."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from core_plugin.privateuse1 import DeviceBackend
from core_plugin_fake_device.plugin import Fake, FakeParams

FAULTS: dict[str, Callable[[ModuleType], Any]] = {}
"""What a fault does to the device's module once the runtime is loaded."""
KEPT: list[object] = []
"""Libraries of kernels, which end with the object."""


@dataclass(frozen=True)
class BrokenParams:
    """The fault."""

    fault: str


class Broken(Fake):
    """A fake device with a fault."""

    Params = BrokenParams

    @staticmethod
    def backend(params: BrokenParams) -> DeviceBackend:
        return Fake.backend(FakeParams())

    @staticmethod
    def unavailable(params: BrokenParams) -> str | None:
        return Fake.unavailable(FakeParams())

    @staticmethod
    def load_runtime(params: BrokenParams) -> ModuleType:
        module = Fake.load_runtime(FakeParams())
        os.environ["BROKEN_DEVICE_FAULT"] = params.fault
        FAULTS.get(params.fault, lambda module: None)(module)
        return module

    @staticmethod
    def load_collectives(params: BrokenParams) -> None:
        from core_plugin_fake_device import fakeccl

        Fake.load_collectives(FakeParams())
        COLLECTIVE_FAULTS.get(params.fault, lambda library: None)(fakeccl)

    @staticmethod
    def initializations() -> int:
        factor = 2 if os.environ.get("BROKEN_DEVICE_FAULT") == "initialised twice" else 1
        return factor * Fake.initializations()

    @staticmethod
    def workarounds() -> contextlib.AbstractContextManager[None]:
        if os.environ.get("BROKEN_DEVICE_FAULT") == "tied weights come apart":
            return contextlib.nullcontext()
        return Fake.workarounds()


def fault(name: str) -> Callable[[Callable[[ModuleType], Any]], Callable[[ModuleType], Any]]:
    def add(function: Callable[[ModuleType], Any]) -> Callable[[ModuleType], Any]:
        FAULTS[name] = function
        return function

    return add


def kernel(operator: str, function: Callable[..., Any], key: str = "PrivateUse1") -> None:
    """Put another kernel in the place of the device's."""
    import torch

    library = torch.library.Library("aten", "IMPL")
    library.impl(operator, function, key)
    KEPT.append(library)


def host(tensor: Any) -> Any:
    """A CPU tensor in the same memory."""
    import torch

    return torch.ops.fake_device.host_alias(tensor) if tensor.device.type == "fake" else tensor


@fault("strides are lost")
def _(module: ModuleType) -> None:
    import torch

    def empty_strided(size: Any, stride: Any, *, dtype: Any, device: Any, **_: Any) -> Any:
        return torch.empty(size, dtype=dtype, device=device)

    kernel("empty_strided", empty_strided)


@fault("casts cut off")
def _(module: ModuleType) -> None:
    import torch

    def copy(source: Any, target: Any, non_blocking: bool = False) -> Any:
        values = host(source)
        if source.dtype == torch.float32 and target.dtype == torch.bfloat16:
            values = (values.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32)
        host(target).copy_(values)
        return target

    kernel("_copy_from", copy)


@fault("a copy takes the wrong leg")
def _(module: ModuleType) -> None:
    """From the host, the first device copies, whichever device the target is on."""

    def copy(source: Any, target: Any, non_blocking: bool = False) -> Any:
        if source.device.type == "cpu" and target.device.index != 0:
            host(target.to("fake:0")).copy_(source)
        else:
            host(target).copy_(host(source))
        return target

    kernel("_copy_from", copy)


@fault("copies that do not block never arrive")
def _(module: ModuleType) -> None:
    def copy(source: Any, target: Any, non_blocking: bool = False) -> Any:
        unpinned = target.device.type == "cpu" and not target.is_pinned()
        if not (non_blocking and unpinned):
            host(target).copy_(host(source))
        return target

    kernel("_copy_from", copy)


@fault("views do not share")
def _(module: ModuleType) -> None:
    def as_strided(tensor: Any, size: Any, stride: Any, offset: Any = None) -> Any:
        return host(tensor).as_strided(size, stride, offset).clone().to(tensor.device)

    kernel("as_strided", as_strided)


@fault("writes in place are dropped")
def _(module: ModuleType) -> None:
    for operator in ("add_.Tensor", "mul_.Tensor", "fill_.Scalar", "fill_.Tensor"):
        kernel(operator, lambda tensor, *_, **__: tensor)


@fault("random numbers are the CPU's")
def _(module: ModuleType) -> None:
    def uniform(tensor: Any, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Any:
        host(tensor).uniform_(low, high)
        return tensor

    kernel("uniform_", uniform)


@fault("the slot is used up")
def _(module: ModuleType) -> None:
    import torch

    torch.utils.rename_privateuse1_backend("fake")
    raise OSError("the driver does not answer")


@fault("autocast computes in float16")
def _(module: ModuleType) -> None:
    import torch

    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def product(operator: Any) -> Callable[..., Any]:
        def in_float16(*tensors: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return operator(*(t if t is None else t.half() for t in tensors))

        return in_float16

    for name in ("mm", "matmul", "linear", "bmm"):
        kernel(name, product(getattr(torch.ops.aten, name)), "AutocastPrivateUse1")


@fault("memory is counted and never given back")
def _(module: ModuleType) -> None:
    module.memory_allocated = module.max_memory_allocated  # type: ignore[attr-defined]


@fault("a backward pass is wrong")
def _(module: ModuleType) -> None:
    kernel("_softmax_backward_data", lambda gradient, *_, **__: gradient.clone())


@fault("an operator ends the process")
def _(module: ModuleType) -> None:
    kernel("cumsum", lambda *_, **__: os.abort())


@fault("an operator never returns")
def _(module: ModuleType) -> None:
    kernel("cumsum", lambda *_, **__: time.sleep(3600))


@fault("a kernel is missing")
def _(module: ModuleType) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no kernel")

    kernel("_local_scalar_dense", refuse)


COLLECTIVE_FAULTS: dict[str, Callable[[Any], None]] = {}
"""What a fault does to the collective library."""


def collective_fault(name: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def add(function: Callable[[Any], None]) -> Callable[[Any], None]:
        COLLECTIVE_FAULTS[name] = function
        return function

    return add


@collective_fault("an average is the sum")
def _(library: Any) -> None:
    from torch.distributed import ReduceOp

    def summed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *tensors: Any) -> Any:
            *others, options = tensors
            if options.reduceOp == ReduceOp.AVG:
                options.reduceOp = ReduceOp.SUM
            return method(self, *others, options)

        return call

    group = library.FakeGroup
    group.allreduce = summed(group.allreduce)
    group.reduce_scatter_single = summed(group.reduce_scatter_single)


@collective_fault("every rank gets the first part")
def _(library: Any) -> None:
    def first_part(self: Any, output: Any, given: Any, options: Any = None) -> Any:
        whole = given.clone()
        self.allreduce([whole]).wait()
        output.copy_(whole.view(-1)[: output.numel()].view(output.shape))
        return library.FakeWork([], output)

    library.FakeGroup.reduce_scatter_single = first_part
    library.FakeGroup._reduce_scatter_base = first_part


@collective_fault("ranks are gathered in the wrong order")
def _(library: Any) -> None:
    gather = library.FakeGroup.allgather

    def reversed_gather(self: Any, outputs: Any, inputs: Any, options: Any = None) -> Any:
        return gather(self, [tensors[::-1] for tensors in outputs], inputs, options)

    library.FakeGroup.allgather = reversed_gather


@collective_fault("a future holds nothing")
def _(library: Any) -> None:
    from torch.futures import Future

    def empty(self: Any) -> Any:
        self.wait()
        future: Future[Any] = Future()
        future.set_result([])
        return future

    library.FakeWork.get_future = empty

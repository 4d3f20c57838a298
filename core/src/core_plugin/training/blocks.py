"""The model's repeated blocks: which they are, and recomputing and compiling them one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from core_plugin.adapters.layer import AdapterLayer
from core_plugin.config import RunConfig
from core_plugin.errors import ConfigError
from core_plugin.params import near
from core_plugin.tensors import WRAPPERS

_KEPT = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""What selective recomputation keeps the results of: torch's operators, where it has them."""


def repeated_blocks(config: RunConfig, model: nn.Module) -> list[nn.Module]:
    """The blocks, in the order of the model; none is inside another.

    They are those of the classes that ``train.blocks`` names, or else those that the architecture
    names, or else those that :func:`find` finds.

    Args:
        config: The run.
        model: The model, with kernels and adapter, and before it is sharded.

    Raises:
        ConfigError: ``train.blocks`` has a name that no module's class has.
    """
    if config.train.blocks is not None:
        return _of_classes(config, model)
    return list(config["model"].implementation.blocks(model)) or find(model)


def find(model: nn.Module) -> list[nn.Module]:
    """The modules of the class that repeats in the model's lists and holds the most parameters.

    A class repeats that stands twice in an ``nn.ModuleList`` or ``nn.Sequential``, or alone in an
    ``nn.ModuleList``. Modules without parts, as ``nn.Linear``, are no blocks, and of modules within
    each other the outer ones are taken.
    """
    repeated = list(_repeated(model))
    sizes: Counter[type] = Counter()
    for module in _outermost(model, repeated):
        sizes[_class(module)] += sum(p.numel() for p in module.parameters())
    largest = max(sizes, key=lambda kind: sizes[kind], default=None)
    if largest is None or not sizes[largest]:
        return []
    return _outermost(model, [module for module in repeated if _class(module) is largest])


def candidates(model: nn.Module) -> str:
    """The classes that ``train.blocks`` could name, for an error: those that several modules have.

    Those that hold the most parameters come first.
    """
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for module in _modules(model):
        counts[class_name(module)] += 1
        sizes[class_name(module)] += sum(p.numel() for p in module.parameters())
    repeated = [name for name, _ in sizes.most_common() if counts[name] > 1 and sizes[name]]
    return ", ".join(f"{name} ({counts[name]})" for name in repeated[:8]) or "none"


def _of_classes(config: RunConfig, model: nn.Module) -> list[nn.Module]:
    names = config.train.blocks or []
    named = [module for module in _modules(model) if class_name(module) in names]
    blocks = _outermost(model, named)
    faults = []
    for name in names:
        if name not in {class_name(module) for module in named}:
            close = near(name, {class_name(module) for module in _modules(model)})
            hint = f"did you mean {close}?" if close else f"candidates: {candidates(model)}"
            faults.append(f"no module of {type(model).__name__} is a {name}; {hint}")
        elif name not in {class_name(module) for module in blocks}:
            faults.append(f"each {name} is inside another block; leave it out")
    if faults:
        origin = config.origin.below("train", "blocks")
        raise ConfigError(*(origin.fault(fault) for fault in faults))
    return blocks


def _repeated(model: nn.Module) -> Iterator[nn.Module]:
    for parent in model.modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            counts = Counter(_class(child) for child in parent)
            alone = isinstance(parent, nn.ModuleList) and len(counts) == 1
            for child in parent:
                if (alone or counts[_class(child)] > 1) and _unwrapped(child)._modules:
                    yield child


def _outermost(model: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of the modules that are in none of the others, in the order of the model."""
    wanted, found = set(modules), []

    def visit(parent: nn.Module) -> None:
        for child in parent.children():
            if child not in wanted:
                visit(child)
            elif child not in found:
                found.append(child)

    visit(model)
    return found


def _modules(model: nn.Module) -> list[nn.Module]:
    """The modules below the model itself; of wrapped ones, the wrapper alone."""
    inner = {module for outer in model.modules() for module in _inside(outer)}
    return [module for module in model.modules() if module is not model and module not in inner]


def _inside(module: nn.Module) -> Iterator[nn.Module]:
    """What a wrapper wraps, or an adapter's layer adapts."""
    for name, child in module._modules.items():
        if child is not None and name in WRAPPERS:
            yield child
    if isinstance(module, AdapterLayer):
        yield module.base_layer


def class_name(module: nn.Module) -> str:
    """The name of the class that a module has in the architecture, within wrappers and adapters."""
    return _class(module).__name__


def _class(module: nn.Module) -> type:
    return type(_unwrapped(module))


def _unwrapped(module: nn.Module) -> nn.Module:
    while (inner := next(_inside(module), None)) is not None:
        module = inner
    return module


# What is done to them


def prepare(config: RunConfig, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Let the blocks be recomputed and compiled as the run says; it comes before sharding.

    Names and classes of modules stay as they are, so checkpoints do not depend on it.

    Raises:
        ConfigError: It is asked for, and there are no blocks, too few, or no such compiler.
    """
    settings, origin = config.train, config.origin.below("train")
    for key, off in (("activation_checkpointing", "none"), ("compile", False)):
        if getattr(settings, key) != off and not blocks:
            raise ConfigError(
                origin.fault(
                    f"is for repeated blocks, and {type(model).__name__} has none; name their "
                    f"classes in train.blocks. Candidates: {candidates(model)}",
                    (key,),
                )
            )
    every = settings.activation_checkpointing
    if isinstance(every, int) and every > len(blocks):
        fault = f"is {every}, and the model has {len(blocks)} blocks: none would be recomputed"
        raise ConfigError(origin.fault(fault, ("activation_checkpointing",)))
    if every != "none":
        recompute(blocks[every - 1 :: every] if isinstance(every, int) else blocks, every)
    if settings.compile:
        try:
            compile_each(blocks, "inductor" if settings.compile is True else settings.compile)
        except ValueError as error:
            raise ConfigError(origin.fault(str(error), ("compile",))) from None


def recompute(blocks: Sequence[nn.Module], what: str | int = "full") -> None:
    """Let the blocks keep less of what their forward pass computes, and compute it again.

    Args:
        blocks: The modules; each call of one keeps its inputs.
        what: ``selective`` keeps the results of matrix products and attention as well.
    """
    settings: dict[str, Any] = {"use_reentrant": False}
    if what == "selective":
        aten = torch.ops.aten
        kept = [getattr(aten, name).default for name in _KEPT if hasattr(aten, name)]
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
    for block in blocks:
        block.forward = MethodType(_recomputed(block, settings), block)


def _recomputed(block: nn.Module, settings: dict[str, Any]) -> Callable[..., Any]:
    """A method that takes the place of ``forward``; a copy of the block computes with its own."""
    forward = block.forward
    if (function := getattr(forward, "__func__", None)) is None:

        def function(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

    def recomputed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, self, *args, **settings, **kwargs)

    return recomputed


def compile_each(blocks: Sequence[nn.Module], backend: str) -> None:
    """Compile each block by itself, when it is first called; equal blocks share what is compiled.

    Args:
        blocks: The modules.
        backend: One of ``torch.compile``.

    Raises:
        ValueError: torch has no such backend.
    """
    from torch._dynamo.exc import InvalidBackend

    try:
        for block in blocks:
            block.compile(backend=backend)
    except InvalidBackend:
        known = torch.compiler.list_backends(exclude_tags=())
        close = near(backend, known)
        hint = f"did you mean {close}?" if close else f"there are {', '.join(known)}"
        raise ValueError(f"torch.compile has no backend {backend!r}; {hint}") from None

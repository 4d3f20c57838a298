"""From a configuration to everything a training step needs, in the order of a run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from core_plugin import state, tensors
from core_plugin.adapters.files import method_name
from core_plugin.config import RunConfig
from core_plugin.devices import autocast
from core_plugin.errors import (
    CheckpointError,
    ConfigError,
    PluginContractError,
    PluginUnavailableError,
    TrainingError,
)
from core_plugin.params import Origin
from core_plugin.training import blocks
from core_plugin.training.batches import Batches
from core_plugin.training.materialize import Materializer
from core_plugin.training.world import World
from core_plugin.types import BaseData, BaseDevice, BaseDistributed, BaseModel, BasePeft
from core_plugin.types.distributed import ShardContext

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Training:
    """What a run is made of, once it is ready to step."""

    config: RunConfig
    world: World
    device: torch.device
    dtype: torch.dtype
    architecture: type[BaseModel]
    strategy: type[BaseDistributed]
    backend: type[BaseDevice]
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    batches: Batches
    tokenizer: tokenizers.Tokenizer
    step: int = 0
    """Optimizer steps that are done."""
    tokens: int = 0
    """Supervised tokens that are done."""
    unlogged_loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    """This rank's sum of losses since the last log, on the device."""
    unlogged_tokens: int = 0
    """The supervised tokens, over all ranks, since the last log."""
    logged_loss: float = 0.0
    """The sum of losses, over all ranks, that was logged since the last checkpoint."""
    logged_tokens: int = 0
    """The supervised tokens that it is of."""


def select_device(config: RunConfig, world: World) -> torch.device:
    """The device of this process.

    Raises:
        PluginUnavailableError: It cannot be used here.
    """
    chosen = config["device"]
    reason = chosen.implementation.unavailable(chosen.params)
    if reason:
        raise PluginUnavailableError(
            chosen.origin.fault(f"the device {chosen.route.name!r} cannot be used here: {reason}")
        )
    chosen.implementation.register(chosen.params)
    device = chosen.implementation.device(chosen.params, world.place.local_rank)
    dtype = DTYPES[config.train.precision]
    if reason := chosen.implementation.unsupported(device, dtype):
        raise PluginUnavailableError(
            f"train.precision: {device} cannot compute in {config.train.precision}: {reason}"
        )
    return device  # type: ignore[no-any-return]


def collective_backend(config: RunConfig, device: torch.device, world: World) -> str:
    """What the process group is made with: the device's own backend, and gloo for the CPU.

    Raises:
        PluginUnavailableError: There are several processes, and the device has no backend.
    """
    chosen = config["device"]
    backend: str | None = chosen.implementation.backend(chosen.params).collective_backend
    if world.size == 1 and not (backend and dist.is_backend_available(backend)):
        return "gloo"
    if backend is None:
        raise PluginUnavailableError(
            chosen.origin.fault(
                f"the device {chosen.route.name!r} declares no collective library, which a run of "
                f"{world.size} processes needs"
            )
        )
    return backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"


def make_tokenizer(config: RunConfig, world: World) -> tokenizers.Tokenizer:
    """The model's own tokenizer or the data's, made on one rank and sent to the others."""
    with world.together("making the tokenizer", TrainingError):
        text = None
        if world.rank == 0:
            text = tokenizer_of(config).to_str()
    return tokenizers.Tokenizer.from_str(world.from_first(text))


def tokenizer_of(config: RunConfig) -> tokenizers.Tokenizer:
    """The model's own tokenizer or the data's."""
    model, data = config["model"], config["data"]
    with _located(model.origin, keys_only=True):
        own: tokenizers.Tokenizer | None = model.implementation.tokenizer(model.params)
    with _located(data.origin, keys_only=True):
        return own or data.implementation.tokenizer(data.params)


def build_model(config: RunConfig, vocabulary_size: int) -> nn.Module:
    """The model on ``meta``, with kernels and adapter."""
    chosen = config["model"]
    with torch.device("meta"):
        model = chosen.implementation.build(chosen.params, vocabulary_size)
        for kernel in config.selections["kernels"]:
            model = kernel.implementation(model, kernel.params)
        if (peft := config.get("peft")) is not None:
            method = peft.implementation
            defaults = chosen.implementation.adapter_defaults(method.peft_type.lower())
            with _located(peft.origin.below("weights")):
                _check_start(method, peft.params)
            with _located(peft.origin):
                method.adapt(model, peft.params, defaults)
    return model  # type: ignore[no-any-return]


def _check_start(method: type[BasePeft], params: Any) -> None:
    """Check, before there is a model, that what an adapter starts from is one of the method."""
    if directory := getattr(params, "weights", None):
        there, wanted = method_name(Path(directory)), method.peft_type.lower()
        if there != wanted:
            raise ConfigError(f"{directory} holds an adapter of {there}, and the run has {wanted}")


@contextmanager
def _located(origin: Origin, *, keys_only: bool = False) -> Iterator[None]:
    """Say of each fault of a plugin where in the configuration it comes from.

    Args:
        origin: The plugin's place.
        keys_only: Only of a fault that begins with the path of one of the plugin's parameters.
    """
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        lines = [_with_place(origin, line, keys_only) for line in str(error).splitlines()]
        raise type(error)("\n".join(lines)) from error.__cause__


def _with_place(origin: Origin, line: str, keys_only: bool) -> str:
    if key := re.match(rf"{re.escape(origin.path)}\.(\S+?):? ", line):
        return origin.below(*key[1].split(".")).fault(line[key.end() :])
    if keys_only or not line[:1].strip():
        return line
    return origin.fault(line.removeprefix(f"{origin.path}: "))


def shard_model(
    config: RunConfig, model: nn.Module, device: torch.device, world: World
) -> nn.Module:
    """Spread the model over the ranks, with memory and values, and check that it is."""
    architecture, strategy, peft = config["model"], config["distributed"], config.get("peft")
    holder = strategy.implementation.parameter_device(strategy.params, device)
    materialize = Materializer(
        model,
        device,
        config.train.seed,
        architecture.implementation.initialize,
        peft.implementation.base_name if peft else tensors.canonical_name,
        architecture.implementation.weights(architecture.params),
        architecture.implementation.renames,
        holder,
    )
    total = sum(p.numel() for p in model.parameters())
    sharded = spread(config, model, device, world.size, materialize)
    _check_sharding(strategy, sharded, device, holder, world, total)
    if peft is not None and (start := getattr(peft.params, "weights", None)):
        unwrapped = strategy.implementation.unwrap_model(sharded)
        with _located(peft.origin.below("weights")):
            peft.implementation.load(Path(start), unwrapped, architecture.implementation.renames)
    return sharded


def spread(
    config: RunConfig,
    model: nn.Module,
    device: torch.device,
    world_size: int,
    materialize: Callable[[nn.Module], None],
) -> nn.Module:
    """Let the strategy shard the model, block by block; ``materialize`` gives it memory, or not."""
    strategy, implementation = config["distributed"], config["distributed"].implementation
    if world_size > 1 and not implementation.capabilities.multiple_processes:
        raise ConfigError(
            strategy.origin.fault(
                f"the strategy {strategy.route.name!r} is for one process, and there are "
                f"{world_size}; each would train by itself"
            )
        )
    if other := state.other_state(model):
        raise PluginContractError(
            f"the model {config['model'].route.name!r} keeps {other} in its state dict, which is "
            "no tensor and would not be saved; make it a buffer"
        )
    found = blocks.repeated_blocks(config, model)
    blocks.prepare(config, model, found)
    backend = config["device"].implementation.backend(config["device"].params)
    with _located(strategy.origin, keys_only=True):
        context = ShardContext(
            device=device,
            device_capabilities=backend.capabilities,
            mesh=implementation.create_mesh(strategy.params, device.type, world_size),
            materialize=materialize,
            blocks=found,
            dtype=DTYPES[config.train.precision],
        )
        return implementation.shard_model(model, strategy.params, context)  # type: ignore[no-any-return]


def _check_sharding(
    chosen: Any,
    model: nn.Module,
    device: torch.device,
    holder: torch.device,
    world: World,
    total: int,
) -> None:
    """Check that the strategy did what it declares, on the device that was asked for."""
    strategy, name = chosen.implementation, chosen.route.name
    unwrapped = strategy.unwrap_model(model)
    made = tensors.model_tensors(unwrapped)
    on_meta = sorted(n for n, t in made.items() if t.is_meta)
    places = {n: holder if isinstance(t, nn.Parameter) else device for n, t in made.items()}
    elsewhere = sorted(n for n, t in made.items() if t.device.type != places[n].type)
    if on_meta:
        raise PluginContractError(
            f"the strategy {name!r} left {on_meta[0]} on meta, without values"
        )
    if elsewhere:
        raise PluginContractError(
            f"the strategy {name!r} put {elsewhere[0]} on {made[elsewhere[0]].device}, "
            f"not on {places[elsewhere[0]]}"
        )
    held = sum(tensors.local(p).numel() for p in unwrapped.parameters())
    if strategy.capabilities.sharded_state and world.size > 1 and held >= total:
        raise PluginContractError(
            f"the strategy {name!r} declares sharded_state, but this rank holds all {total} "
            "parameters"
        )


def build_optimizer(config: RunConfig, model: nn.Module) -> Optimizer:
    """Make the optimizer of a sharded model, and check that it holds all that is trained.

    Raises:
        ConfigError: The parameters do not fit the model, as the plugin says with a ``ValueError``.
        CheckpointError: What :func:`core_plugin.state.check_optimizer` raises.
    """
    chosen = config["optimizer"]
    with _located(chosen.origin):
        try:
            optimizer = chosen.implementation(model, chosen.params)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error
    state.check_optimizer(config["distributed"].implementation.unwrap_model(model), optimizer)
    return optimizer  # type: ignore[no-any-return]


def build(config: RunConfig, device: torch.device, world: World) -> Training:
    """Everything up to the first step, or to resuming."""
    tokenizer = make_tokenizer(config, world)
    with world.together("building the model", TrainingError):
        meta_model = build_model(config, tokenizer.get_vocab_size())
    with world.together("sharding the model", TrainingError, collective=True):
        model = shard_model(config, meta_model, device, world)
    strategy = config["distributed"].implementation
    with world.together("making the optimizer", TrainingError, collective=True):
        optimizer = build_optimizer(config, model)
        chosen = config["scheduler"]
        scheduler = chosen.implementation(optimizer, chosen.params, steps=config.train.steps)
    with world.together("loading the data", TrainingError):
        batches = _batches(config, tokenizer, world)
    _check_data(batches, world)
    return Training(
        config=config,
        world=world,
        device=device,
        dtype=DTYPES[config.train.precision],
        architecture=config["model"].implementation,
        strategy=strategy,
        backend=config["device"].implementation,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=batches,
        tokenizer=tokenizer,
        unlogged_loss=torch.zeros((), device=device),
    )


PREPARATION_STEPS = 4
"""How many steps' batches an adapter may start from."""


def prepare_adapter(training: Training) -> None:
    """Let a new adapter start from the data of the first steps, on all ranks alike."""
    config = training.config
    peft = config.get("peft")
    if peft is None or getattr(peft.params, "weights", None):
        return
    whole = training.batches.undivided()
    model = training.strategy.unwrap_model(training.model)
    batches = (
        {name: tensor.to(training.device) for name, tensor in batch.items()}
        for step in range(PREPARATION_STEPS)
        for batch in whole.step(step)
    )
    was_training = model.training
    eager = torch.compiler.set_stance("force_eager") if config.train.compile else nullcontext()
    with torch.no_grad(), precision(training), eager:
        peft.implementation.prepare(model.eval(), peft.params, batches, training.architecture.loss)
    model.train(was_training)


def precision(training: Training) -> AbstractContextManager[Any]:
    """What a forward pass runs in, so that it computes in the run's precision."""
    if training.dtype == torch.float32 or training.strategy.capabilities.mixed_precision:
        return nullcontext()
    return autocast(training.device.type, training.dtype)


def _batches(config: RunConfig, tokenizer: tokenizers.Tokenizer, world: World) -> Batches:
    data: type[BaseData] = config["data"].implementation
    with _located(config["data"].origin, keys_only=True):
        samples = data.load(config["data"].params, tokenizer)
    if len(samples) == 0:
        raise ConfigError(config["data"].origin.fault("the data has no samples"))
    return Batches(
        data,
        samples,
        config.train.seed,
        config.train.global_batch_size,
        config.train.micro_batch_size,
        world.rank,
        world.size,
    )


def _check_data(batches: Batches, world: World) -> None:
    """Check that all ranks have the same samples, as far as their number and two of them show.

    Raises:
        TrainingError: On every rank.
    """
    content = "".join(str(batches.sample(i)) for i in (0, batches.samples - 1))
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    found = world.gather(f"{batches.samples} samples, of which the first and last are {digest}")
    if len(set(found)) > 1:
        rows = [f"rank {rank}: {what}" for rank, what in enumerate(found)]
        raise TrainingError("the ranks have different data:\n  " + "\n  ".join(rows))

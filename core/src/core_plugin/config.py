"""The run's YAML, resolved against the installed plugins and checked whole."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal

import pydantic_core

from core_plugin import document as documents
from core_plugin import policy
from core_plugin.errors import ConfigError, CorePluginError
from core_plugin.params import Origin, near, parse_params, require
from core_plugin.plugin import BasePlugin
from core_plugin.types import (
    AdapterLayerPlugin,
    BaseDistributed,
    DataPlugin,
    DevicePlugin,
    DistributedPlugin,
    HookPlugin,
    KernelPlugin,
    LauncherPlugin,
    ModelPlugin,
    OptimizerPlugin,
    PeftPlugin,
    SchedulerPlugin,
)


@dataclasses.dataclass(frozen=True)
class TrainParams:
    """How long and how to train.

    Attributes:
        steps: Optimizer steps.
        global_batch_size: Samples in one optimizer step, over all ranks.
        micro_batch_size: Samples in one forward and backward pass of one rank.
        precision: What the model computes in; parameters, loss and optimizer stay float32.
        max_grad_norm: The global 2-norm that gradients are clipped to; null does not clip.
        seed: Of initialisation, data order and dropout.
        log_every: Steps between two logs; only then is the device waited for.
        deterministic: Refuse operations whose results differ from run to run.
        blocks: The class names of the model's repeated blocks, which are sharded, recomputed and
            compiled one by one; null for those that the architecture names, or that are found.
        activation_checkpointing: What of a block's activations is computed again in backward
            instead of kept: none, all (full), all but the results of matrix products and
            attention (selective), or all in every n-th block (a number).
        compile: Compile the blocks one by one: true, or the name of a ``torch.compile`` backend.
        hang_timeout: Seconds without progress after which the run ends and says which rank is
            where; null waits for ever.
    """

    steps: int
    global_batch_size: int = 8
    micro_batch_size: int = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    max_grad_norm: float | None = 1.0
    seed: int = 0
    log_every: int = 1
    deterministic: bool = False
    blocks: list[str] | None = None
    activation_checkpointing: Literal["none", "full", "selective"] | int = "none"
    compile: bool | str = False
    hang_timeout: float | None = 1800.0

    def __post_init__(self) -> None:
        counts = ("steps", "global_batch_size", "micro_batch_size", "log_every")
        require(
            *(
                (getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
                for name in counts
            ),
            (
                self.micro_batch_size <= self.global_batch_size,
                f"micro_batch_size ({self.micro_batch_size}) is larger than global_batch_size "
                f"({self.global_batch_size})",
            ),
            (
                self.max_grad_norm is None or self.max_grad_norm > 0,
                f"max_grad_norm must be positive or null, got {self.max_grad_norm}",
            ),
            (0 <= self.seed < 2**63, f"seed must be from 0 to 2**63 - 1, got {self.seed}"),
            (
                isinstance(self.activation_checkpointing, str)
                or self.activation_checkpointing >= 1,
                "activation_checkpointing must be at least 1 if it is a number, "
                f"got {self.activation_checkpointing}",
            ),
            (
                self.hang_timeout is None or self.hang_timeout > 0,
                f"hang_timeout must be positive or null, got {self.hang_timeout}",
            ),
        )


@dataclasses.dataclass(frozen=True)
class CheckpointParams:
    """What is saved, where, and where the run starts.

    Attributes:
        directory: Where the run writes: checkpoints, the resolved configuration, logs. Paths count
            from the working directory.
        every: Steps between two checkpoints; null saves at the end only.
        keep: How many checkpoints are kept, the newest ones.
        keep_best: Keep, beside the newest, the one before which the loss was lowest.
        asynchronous: Write checkpoints while training goes on, from a copy on the host.
        resume: ``none`` starts anew, in a directory without checkpoints; ``auto`` (``--resume``)
            goes on from the newest complete checkpoint, if there is one; else the path of one.
        allow_changes: Go on from a checkpoint that another model, data, adapter or optimizer
            configuration or implementation wrote.
    """

    directory: str = "runs/default"
    every: int | None = None
    keep: int = 2
    keep_best: bool = True
    asynchronous: bool = False
    resume: str = "none"
    allow_changes: bool = False

    def __post_init__(self) -> None:
        require(
            (
                self.every is None or self.every >= 1,
                f"every must be at least 1 or null, got {self.every}",
            ),
            (self.keep >= 1, f"keep must be at least 1, got {self.keep}"),
        )


@dataclasses.dataclass(frozen=True)
class PluginsParams:
    """Which distributions' plugins may be used (canonical names, optionally with versions).

    Attributes:
        allow: Only these; null allows all.
        deny: None of these.
    """

    allow: list[str] | None = None
    deny: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Slot:
    """A key of the YAML that chooses plugins."""

    plugin_type: type[BasePlugin]
    default: Any = None
    many: bool = False


SLOTS: Mapping[str, Slot] = {
    "model": Slot(ModelPlugin, "decoder"),
    "data": Slot(DataPlugin, "text"),
    "peft": Slot(PeftPlugin),
    "kernels": Slot(KernelPlugin, [], many=True),
    "optimizer": Slot(OptimizerPlugin, "adamw"),
    "scheduler": Slot(SchedulerPlugin, "constant"),
    "distributed": Slot(DistributedPlugin, "none"),
    "device": Slot(DevicePlugin, "auto"),
    "hooks": Slot(HookPlugin, ["progress", "jsonl"], many=True),
    "launcher": Slot(LauncherPlugin, "local"),
}
_TYPES: list[type[BasePlugin]] = [*(s.plugin_type for s in SLOTS.values()), AdapterLayerPlugin]
PLUGIN_TYPES: Mapping[str, type[BasePlugin]] = {t.type_name: t for t in _TYPES}
"""The plugin types by name: those that the YAML chooses from, and what plugins find themselves."""
SECTIONS: Mapping[str, type] = {
    "train": TrainParams,
    "checkpoint": CheckpointParams,
    "plugins": PluginsParams,
}


def split_name(text: str) -> tuple[str, str]:
    """The plugin type and the name in ``type:name`` or ``type/name``, as commands are given them.

    The type is empty if there is none. A name may be a qualified one, ``distribution:name``.
    """
    before, slash, after = text.partition("/")
    if not slash:
        before, _, after = text.partition(":")
    return (before, after) if slash or before in PLUGIN_TYPES else ("", text)


@dataclasses.dataclass(frozen=True)
class Selection:
    """A plugin that the run names, with its parameters."""

    route: BasePlugin
    params: Any
    origin: Origin

    @property
    def implementation(self) -> Any:
        """The class or function."""
        return self.route.resolve()


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A whole run, checked: every plugin is loaded and every parameter has its type."""

    selections: Mapping[str, tuple[Selection, ...]]
    train: TrainParams
    checkpoint: CheckpointParams
    plugins: PluginsParams
    document: Mapping[str, Any]
    """What the user wrote, overrides included."""
    origin: Origin = dataclasses.field(default_factory=Origin, compare=False)
    """Where each part of it stands."""

    def __getitem__(self, slot: str) -> Selection:
        """The one selection of a slot. Raises KeyError if it is empty."""
        if not self.selections[slot]:
            raise KeyError(slot)
        return self.selections[slot][0]

    def get(self, slot: str) -> Selection | None:
        """The one selection of a slot, or None if it is empty."""
        return next(iter(self.selections[slot]), None)

    def params(self, slot: str) -> Any:
        """The parameters of the one selection of a slot, or None if it is empty."""
        selection = self.get(slot)
        return selection.params if selection else None

    def resolved(self) -> dict[str, Any]:
        """The configuration with every default filled in, as plain data that can be read again."""
        document: dict[str, Any] = {}
        for key, slot in SLOTS.items():
            chosen = [{"name": s.route.name, **plain_data(s.params)} for s in self.selections[key]]
            document[key] = chosen if slot.many else next(iter(chosen), None)
        for key in SECTIONS:
            document[key] = plain_data(getattr(self, key))
        return document

    def digest(self) -> str:
        """A hash of the resolved configuration."""
        text = json.dumps(self.resolved(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over another process's run, its allow and deny lists included."""
        self.__dict__.update(state)
        policy.use(policy.Policy.of(self.plugins.allow, self.plugins.deny))


def plain_data(value: Any) -> Any:
    """A dataclass as the data that YAML and JSON hold, equal in every process."""
    if dataclasses.is_dataclass(value):
        fields = (field.name for field in dataclasses.fields(value) if field.init)
        return {name: plain_data(getattr(value, name)) for name in fields}
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted(map(plain_data, value), key=json.dumps)
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    return pydantic_core.from_json(pydantic_core.to_json(value, inf_nan_mode="constants"))


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, resolve and check a run's YAML.

    Args:
        path: The file.
        overrides: ``a.b=value`` each; the value is YAML.

    Raises:
        ConfigError: With every fault, each with its file and line.
    """
    faults = _Faults()
    document, places = documents.read(Path(path))
    for text in overrides:
        key, dot, _ = text.partition("=")[0].strip().partition(".")
        if dot and key in SLOTS and document.get(key) is None:
            document[key] = copy.deepcopy(SLOTS[key].default)
        with faults.gathered():
            documents.override(document, places, text)
    return _resolve(document, Origin(places=places), faults)


def resolve(document: Mapping[str, Any]) -> RunConfig:
    """Resolve and check a configuration that is plain data.

    Raises:
        ConfigError: With every fault.
    """
    return _resolve(copy.deepcopy(dict(document)), Origin(), _Faults())


def dump(document: Mapping[str, Any], path: Path) -> None:
    """Write a configuration as YAML."""
    documents.write(document, path)


class _Faults:
    """Gathers the faults of all parts of a configuration, so that they are raised together."""

    def __init__(self) -> None:
        self._errors: list[CorePluginError] = []

    def add(self, message: str) -> None:
        self._errors.append(ConfigError(message))

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        try:
            yield
        except CorePluginError as error:
            self._errors.append(error)

    def __bool__(self) -> bool:
        return bool(self._errors)

    def together(self) -> ConfigError:
        parts = (e.faults if isinstance(e, ConfigError) else [str(e)] for e in self._errors)
        error = ConfigError(*dict.fromkeys(fault for part in parts for fault in part))
        causes = [e.__cause__ for e in self._errors if e.__cause__]
        error.__cause__ = BaseExceptionGroup("what the plugins raised", causes) if causes else None
        return error


def _resolve(document: dict[str, Any], origin: Origin, faults: _Faults) -> RunConfig:
    _unknown_keys(document, origin, faults)
    sections: dict[str, Any] = {}
    for key, params_type in SECTIONS.items():
        with faults.gathered():
            sections[key] = _section(document.get(key), params_type, origin.below(key))
    are_lists_used = False
    with faults.gathered():
        if lists := sections.get("plugins"):
            policy.use(policy.Policy.of(lists.allow, lists.deny))
            are_lists_used = True
    if not are_lists_used:  # resolving could import what the lists are to keep out
        raise faults.together()
    selections = {
        key: tuple(_selections(document.get(key, slot.default), slot, origin.below(key), faults))
        for key, slot in SLOTS.items()
    }
    if faults:
        raise faults.together()
    run = RunConfig(selections, **sections, document=document, origin=origin)
    for fault in _combination_faults(run):
        faults.add(fault)
    if faults:
        raise faults.together()
    return run


def _unknown_keys(document: Mapping[str, Any], origin: Origin, faults: _Faults) -> None:
    known = [*SLOTS, *SECTIONS]
    for key in document:
        if key not in known:
            close = near(str(key), known)
            hint = f"did you mean {close}?" if close else f"known are {', '.join(known)}"
            faults.add(origin.fault(f"is not a known key; {hint}", (str(key),)))


def _section(config: Any, params_type: type, origin: Origin) -> Any:
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(origin.fault(f"must be a mapping, got {config!r}"))
    return parse_params(config, params_type, origin)


def _selections(config: Any, slot: Slot, origin: Origin, faults: _Faults) -> Iterator[Selection]:
    if config is None and slot.default is not None:
        none = "write [] for none" if slot.many else f"the default is {slot.default}"
        faults.add(origin.fault(f"names no plugin; {none}"))
    elif slot.many and not isinstance(config, list | None):
        faults.add(origin.fault(f"must be a list of plugins, got {config!r}"))
    elif slot.many:
        for index, item in enumerate(config or ()):
            with faults.gathered():
                yield _select(slot.plugin_type, item, origin.below(index))
    elif config is not None:
        with faults.gathered():
            yield _select(slot.plugin_type, config, origin)


def _select(plugin_type: type[BasePlugin], config: Any, origin: Origin) -> Selection:
    if isinstance(config, str):
        config = {"name": config}
    if not isinstance(config, Mapping):
        raise ConfigError(
            origin.fault(f"must be a plugin's name or a mapping with one, got {config!r}")
        )
    params = dict(config)
    name = params.pop("name", None)
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(origin.fault(f"must be a plugin's name, got {name!r}", ("name",)))
    route = plugin_type(name)
    try:
        params_type = route.params_type()
    except CorePluginError as error:
        error.args = (origin.fault(str(error), ("name",)),)
        raise
    return Selection(route, plugin_type.parse_params(params, params_type, origin=origin), origin)


def _combination_faults(run: RunConfig) -> Iterator[str]:
    """What the parameters themselves, and the capabilities, say against their combination.

    A ``Params`` may have a method ``faults(run)`` that yields what does not fit the rest.
    """
    for selection in (s for chosen in run.selections.values() for s in chosen):
        check = getattr(selection.params, "faults", None)
        fields = [field.name for field in dataclasses.fields(selection.params)]
        for fault in _as_strings(check(run)) if callable(check) else ():
            yield selection.origin.fault(fault, fields=fields)
    launcher, strategy = run["launcher"], run["distributed"]
    processes = launcher.implementation.processes(launcher.params)
    if processes > 1 and not strategy.implementation.capabilities.multiple_processes:
        yield launcher.origin.fault(
            f"{processes} processes, but the strategy {strategy.route.name!r} is for one; "
            "choose another one under distributed"
        )
    if run.checkpoint.asynchronous and _saves_its_own_way(strategy.implementation):
        yield strategy.origin.fault(
            f"the strategy {strategy.route.name!r} has a save_checkpoint of its own, but no "
            "stage_checkpoint: it cannot save while training goes on; leave out "
            "checkpoint.asynchronous"
        )


def _saves_its_own_way(strategy: type[BaseDistributed]) -> bool:
    """Whether a strategy overrides what writes its checkpoints, but not what copies them."""
    saves, copies = (
        inspect.getattr_static(strategy, name) is not vars(BaseDistributed)[name]
        for name in ("save_checkpoint", "stage_checkpoint")
    )
    return saves and not copies


def _as_strings(faults: str | Iterable[str]) -> list[str]:
    return [faults] if isinstance(faults, str) else list(faults)

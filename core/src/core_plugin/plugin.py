"""Plugin types, routes and their resolution.

Three objects, never mixed: a plugin *type* (a subclass of :class:`BasePlugin`) owns a registry and
an entry-point group; a *route* (``OptimizerPlugin("muon")``) holds a name; the *implementation* is
the class or function that was registered under it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import operator
import re
import threading
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from packaging.utils import canonicalize_name

from core_plugin import contract, discovery, policy
from core_plugin.errors import (
    CorePluginError,
    PluginConflictError,
    PluginContractError,
    PluginDisabledError,
    PluginIncompatibleError,
    PluginLoadError,
    PluginNotFoundError,
)
from core_plugin.params import Origin, near, parse_params

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from core_plugin.discovery import Candidate, Distribution

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Registration:
    """How a name comes to its implementation in this process, and where from."""

    load: Callable[[], Any]
    target: str
    """The object reference, ``package.module:object``."""
    origin: str
    """For people: the target with its file and line, or with its distribution."""
    override: bool = False
    candidate: Candidate | None = None
    """The entry point, if the implementation came from one."""

    @property
    def distribution(self) -> Distribution | None:
        """The distribution that the implementation came from, if it was installed."""
        return self.candidate.distribution if self.candidate else None


@dataclasses.dataclass(frozen=True)
class Resolved:
    """An implementation that was loaded and fulfils its type's contract."""

    route: BasePlugin
    """The first one that asked for it."""
    implementation: Any
    registration: Registration


class BasePlugin:
    """The base of the plugin types. A type is a subclass; an instance of it is a route.

    ``class SamplerPlugin(BasePlugin, contract=BaseSampler)`` defines a type whose entry-point
    group is ``core_plugin.sampler``; it shares no names with another one, its own base included.
    """

    type_name: ClassVar[str]
    """The type's name, as in the YAML and in the entry-point group ``core_plugin.<type_name>``."""
    contract: ClassVar[Any] = None
    """The abstract base, or the function, that implementations fulfil."""

    _registered: ClassVar[dict[str, Registration]]
    _outcomes: ClassVar[dict[Candidate | Registration, Resolved | CorePluginError]]
    """What loading gave, by what was loaded: a name and its qualified form are loaded once."""
    _locks: ClassVar[dict[Candidate | Registration, threading.RLock]]

    __slots__ = ("name",)
    name: str

    def __init_subclass__(
        cls, *, type_name: str | None = None, contract: Any = None, **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        cls.type_name = type_name or _snake_case(cls.__name__.removesuffix("Plugin"))
        if not re.fullmatch(r"[a-z][a-z0-9_]*", cls.type_name):
            raise TypeError(
                f"{cls.__qualname__}: {cls.type_name!r} cannot be the name of a plugin type; call "
                "the class SamplerPlugin, or give it a type_name of a-z, 0-9 and _"
            )
        cls.contract = contract or cls.contract
        cls._registered, cls._outcomes, cls._locks = {}, {}, {}

    def __init__(self, name: str = "") -> None:
        if type(self) is BasePlugin:
            raise TypeError("BasePlugin is no plugin type; use a subclass such as OptimizerPlugin")
        if not isinstance(name, str) or not name.strip():
            raise TypeError(
                f"{type(self).__name__} needs a plugin's name, a string such as "
                f"{type(self).__name__}('example'); got {name!r}"
            )
        object.__setattr__(self, "name", name)

    def __setattr__(self, attribute: str, value: object) -> NoReturn:
        raise AttributeError(f"{self!r} is a route and holds a name alone; cannot set {attribute}")

    def __reduce__(self) -> tuple[type[BasePlugin], tuple[str]]:
        return type(self), (self.name,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BasePlugin) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash(self.__reduce__())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the implementation, if its type is of the function form."""
        implementation = self.resolve()
        if inspect.isclass(implementation):
            methods = ", ".join(contract.contract_methods(type(self).contract or implementation))
            raise PluginContractError(
                f"{self._described()} is a class, which is not instantiated; "
                f"call its methods, as in {self!r}.<method>(...): {methods}"
            )
        return implementation(*args, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(f"{self!r} does not forward {attribute}")
        implementation = self.resolve()
        if not inspect.isclass(implementation):
            raise AttributeError(
                f"{self._described()} is a function and has no {attribute!r}; call it: "
                f"{self!r}(...)"
            )
        try:
            return getattr(implementation, attribute)
        except AttributeError:
            has = [n for n in dir(implementation) if not n.startswith("_")]
            raise AttributeError(
                f"{self._described()} has no {attribute!r}; it has {', '.join(has)}"
            ) from None

    # Registration

    def register(self, *, override: bool = False) -> Callable[[T], T]:
        """A decorator that registers a class or function in this process and returns it unchanged.

        An object that is also an installed entry point stays that distribution's.

        Args:
            override: The name is meant to replace another one; nothing is warned about.

        Raises:
            TypeError: The object is neither a class nor a callable.
            ValueError: The name is a qualified one.
        """

        def decorate(implementation: T) -> T:
            if not callable(implementation):
                raise TypeError(
                    f"{self!r}: cannot register {implementation!r}, which is neither a class "
                    "nor a callable"
                )
            target, origin = _target(implementation), origin_of(implementation)
            self._enter(Registration(lambda: implementation, target, origin, override))
            return implementation

        return decorate

    @classmethod
    def register_lazy(cls, name: str, target: str, *, override: bool = False) -> None:
        """Register ``package.module:object`` under a name; it is imported when it is resolved.

        Raises:
            TypeError: The target is no object reference.
            ValueError: The name is a qualified one.
        """
        module, _, attribute = target.partition(":")
        if not module or not attribute:
            raise TypeError(f"{target!r} is not an object reference (package.module:object)")

        def load() -> Any:
            return operator.attrgetter(attribute)(importlib.import_module(module))

        origin = f"{target} (registered lazily)"
        cls(name)._enter(Registration(load, target, origin, override))

    def _enter(self, registration: Registration) -> None:
        cls = type(self)
        if ":" in self.name:
            raise ValueError(
                f"{self!r}: register a name without ':', which chooses among distributions"
            )
        # No lock: an import that registers must not wait for a thread that waits for that import.
        earlier = cls._registered.get(self.name)
        cls._registered[self.name] = registration
        if earlier and not registration.override:
            warnings.warn(
                f"{cls.__name__} {self.name!r} was registered by {earlier.origin} and is now "
                f"replaced by {registration.origin}; register(override=True) says it is meant",
                stacklevel=3,
            )

    # Resolution

    @classmethod
    def group(cls) -> str:
        """The entry-point group of the type."""
        return discovery.GROUP_PREFIX + cls.type_name

    @classmethod
    def names(cls) -> list[str]:
        """The names that are registered or installed, sorted; nothing is imported."""
        installed = {c.name for c in discovery.scan().group(cls.group()) if not c.shadowed_by}
        return sorted(installed | set(cls._registered))

    @classmethod
    def loaded(cls) -> list[Resolved]:
        """What has been resolved in this process."""
        return [one for one in cls._outcomes.values() if isinstance(one, Resolved)]

    def resolve(self) -> Any:
        """The implementation itself: loaded at most once, and checked against the contract.

        Raises:
            PluginNotFoundError: Nothing of this type has the name.
            PluginConflictError: Two distributions have it.
            PluginDisabledError: The allow or deny list forbids the distribution.
            PluginIncompatibleError: The distribution wants another core-plugin or torch.
            PluginLoadError: Importing it raised; raised again with the same cause next time.
            PluginContractError: It is not what the type asks for.
        """
        return self._resolution().implementation

    def registration(self) -> Registration:
        """Where the implementation comes from. Raises as :meth:`resolve` does."""
        return self._resolution().registration

    def params_type(self) -> type:
        """The dataclass of the implementation's parameters. Raises as :meth:`resolve` does."""
        return contract.params_of(self.resolve())

    def _resolution(self) -> Resolved:
        cls, registration = type(self), self._find()
        key = registration.candidate or registration
        with cls._locks.setdefault(key, threading.RLock()):
            if key not in cls._outcomes:
                try:
                    cls._outcomes[key] = self._load(registration)
                except CorePluginError as error:
                    cls._outcomes[key] = error
            outcome = cls._outcomes[key]
        if isinstance(outcome, CorePluginError):
            raise type(outcome)(*outcome.args) from outcome.__cause__
        return outcome

    def _find(self) -> Registration:
        """The registration in this process, or else the one entry point that has the name.

        An object that was registered by importing its module, and that an entry point names too,
        is found by the entry point: what is used does not depend on what was imported before.
        """
        in_process = type(self)._registered.get(self.name)
        if in_process and in_process.target not in {c.value for c in self._installed()}:
            return in_process
        candidate = choose(type(self), self.name)
        load = candidate.entry_point.load
        return Registration(load, candidate.value, str(candidate), candidate=candidate)

    def _installed(self) -> list[Candidate]:
        group = discovery.scan().group(self.group())
        return [c for c in group if c.name == self.name and not c.shadowed_by]

    def _load(self, registration: Registration) -> Resolved:
        replaced = [] if registration.candidate else self._installed()
        if replaced and not registration.override:
            warnings.warn(
                f"{self!r}: {registration.origin} is used in place of "
                f"{' and '.join(map(str, replaced))}; register(override=True) says it is meant",
                stacklevel=4,
            )
        try:
            implementation = registration.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            raise PluginLoadError(
                f"{self!r} ({registration.origin}) cannot be imported: "
                f"{type(error).__name__}: {error}"
                + (f"; install the package that has {missing!r}" if missing else "")
            ) from error
        faults = contract.faults(implementation, type(self).contract)
        if faults:
            raise PluginContractError(
                f"{self!r} ({registration.origin}) is not what {type(self).__name__} asks for:"
                + "".join(f"\n  - {fault}" for fault in faults)
            )
        return Resolved(self, implementation, registration)

    def _described(self) -> str:
        return f"{self!r} ({self.registration().origin})"

    # Parameters

    @classmethod
    def parse_params(cls, config: Any, params_type: type[T], *, origin: Origin | None = None) -> T:
        """Make an instance of a parameter dataclass from a configuration.

        Args:
            config: An instance of ``params_type`` (returned as it is), a mapping, or None for the
                defaults. It is never changed.
            params_type: The dataclass.
            origin: Where the configuration stands, for the messages.

        Raises:
            ConfigError: With every unknown, missing and ill-typed field.
            TypeError: ``params_type`` is no dataclass, or ``config`` is something else.
        """
        return parse_params(config, params_type, origin or Origin(path=cls.type_name))


def choose(plugin_type: type[BasePlugin], name: str) -> Candidate:
    """The one installed candidate that a name (or ``distribution:name``) stands for.

    Raises:
        PluginNotFoundError, PluginConflictError, PluginDisabledError, PluginIncompatibleError:
            As :meth:`BasePlugin.resolve` says.
    """
    distribution, _, plain = name.rpartition(":")
    named = [
        c
        for c in discovery.scan().group(plugin_type.group())
        if c.name == plain
        and (not distribution or c.distribution.name == canonicalize_name(distribution))
    ]
    if all(c.shadowed_by for c in named):
        raise PluginNotFoundError(_not_found(plugin_type, name, named))
    contenders = policy.contenders(named)
    if not contenders:
        denied = [(c, policy.active().denial(c.distribution)) for c in named if not c.shadowed_by]
        reasons = "; ".join(f"{candidate}: {reason}" for candidate, reason in denied)
        raise PluginDisabledError(f"{plugin_type.__name__} {name!r} may not be used: {reasons}")
    if len(contenders) > 1:
        raise PluginConflictError(
            f"{len(contenders)} distributions have a {plugin_type.__name__} {name!r}:"
            + "".join(f"\n  - name: {c.qualified_name}    is {c}" for c in contenders)
            + "\nchoose one of these names, or uninstall one of the distributions"
        )
    (chosen,) = contenders
    if reason := discovery.incompatibility(chosen.distribution):
        raise PluginIncompatibleError(
            f"{plugin_type.__name__} {name!r} ({chosen}) {reason}; "
            f"install a version of {chosen.distribution.name} that fits"
        )
    return chosen


_KNOWN_PACKAGES: Mapping[tuple[str, str], str] = {
    ("device", "fake"): "core-plugin-fake-device",
    ("distributed", "ddp"): "core-plugin-ddp",
    ("distributed", "fsdp2"): "core-plugin-fsdp2",
    ("peft", "ia3"): "core-plugin-ia3",
    ("peft", "lora"): "core-plugin-lora",
    ("peft", "prompt_tuning"): "core-plugin-prompt-tuning",
    ("optimizer", "muon"): "core-plugin-muon",
}
"""What is published elsewhere, for the message that says what to install."""


def _not_found(plugin_type: type[BasePlugin], name: str, shadowed: list[Candidate]) -> str:
    scan, names = discovery.scan(), plugin_type.names()
    lines = [f"no {plugin_type.__name__} is called {name!r}"]
    lines += [
        f"it is in {c.distribution}, which is shadowed by {c.shadowed_by}: take that off the path"
        for c in shadowed
    ]
    qualified = (c.qualified_name for c in scan.group(plugin_type.group()) if not c.shadowed_by)
    if close := near(name, [*names, *qualified]):
        lines.append(f"did you mean {close}?")
    if package := _KNOWN_PACKAGES.get((plugin_type.type_name, name)):
        lines.append(f"pip install {package}")
    lines.append(f"installed: {', '.join(names) or 'none'}")
    if scan.problems:
        lines.append("core-plugin doctor tells which installed metadata cannot be used")
    return "; ".join(lines)


def _target(implementation: Any) -> str:
    name = getattr(implementation, "__qualname__", type(implementation).__qualname__)
    return f"{implementation.__module__}:{name}"


def origin_of(implementation: Any) -> str:
    """Where an object is defined, for messages."""
    try:
        file = inspect.getsourcefile(implementation)
        line = inspect.getsourcelines(implementation)[1]
    except (OSError, TypeError):
        return _target(implementation)
    return f"{_target(implementation)} ({file}:{line})"


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()

"""Parameter dataclasses: from a configuration, to a JSON schema, with every fault at once."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pydantic_core
from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from core_plugin import docstrings
from core_plugin.errors import ConfigError, PluginContractError

T = TypeVar("T")
Path = tuple[str | int, ...]

_NAMES_A_KEY = ("missing", "unexpected_keyword_argument")
"""The faults of pydantic whose location ends with a key that need not be in the configuration."""
_OF_THE_WHOLE = ("value_error", "assertion_error")
"""The faults that a dataclass has found itself, in its ``__post_init__``."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a piece of configuration stands: its dotted path, and the place of each part."""

    path: str = ""
    places: Mapping[Path, str] = dataclasses.field(default_factory=dict)
    """``file:line``, or an override, by the path below this one; ``()`` is this one's own."""

    def below(self, *keys: str | int) -> Origin:
        """The origin of a part."""
        depth = len(keys)
        inside = {p[depth:]: place for p, place in self.places.items() if p[:depth] == keys}
        return Origin(_dotted(self.path, *keys), {(): self._place(keys), **inside})

    def fault(self, message: str, at: Path = (), fields: Iterable[str] = ()) -> str:
        """The message with its place before it: ``file:line: path: message``.

        Args:
            message: What is wrong.
            at: The part that it is about.
            fields: The names of that part's own parts. The places of those that the message names
                go before the part's own, as what is wrong is in one of them.
        """
        named = [(*at, word) for word in re.findall(r"\w+", message) if word in fields]
        places = dict.fromkeys(self.places[part] for part in named if part in self.places)
        where = ", ".join(places) or self._place(at)
        return ": ".join(filter(None, (where, _dotted(self.path, *at), message)))

    def _place(self, at: Path) -> str:
        """The place of a part, or of what it would be in."""
        enclosing = (at[:n] for n in range(len(at), -1, -1))
        return next((self.places[path] for path in enclosing if path in self.places), "")


def _dotted(path: str, *keys: str | int) -> str:
    """``optimizer`` and ``betas``, ``0`` make ``optimizer.betas.0``."""
    return ".".join([*([path] if path else []), *map(str, keys)])


def parse_params(config: Any, params_type: type[T], origin: Origin) -> T:
    """See :meth:`core_plugin.plugin.BasePlugin.parse_params`."""
    if not inspect.isclass(params_type) or not dataclasses.is_dataclass(params_type):
        raise TypeError(f"{origin.path}: params must be a dataclass type, got {params_type!r}")
    if isinstance(config, params_type):
        return config
    if config is None:
        config = {}
    if not isinstance(config, Mapping):
        raise TypeError(
            f"{origin.path}: the parameters must be a mapping, a {params_type.__qualname__} or "
            f"None, got {type(config).__name__} ({config!r})"
        )
    document = _as_json(config, origin)
    try:
        params: T = _adapter(params_type).validate_json(document, strict=True, extra="forbid")
    except ValidationError as error:
        raise ConfigError(*_faults(error, params_type, config, origin)) from None
    return params


def json_schema(params_type: Any) -> dict[str, Any]:
    """The JSON schema of a parameter dataclass; unknown fields are refused by it too.

    What the docstrings say of the fields is their description.
    """
    return _adapter(params_type).json_schema(schema_generator=_Schema)


class _Schema(GenerateJsonSchema):
    """pydantic's schema of a dataclass, held to what the dataclass is made from, and described."""

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        params_type = schema["cls"]
        made = super().dataclass_schema(schema)
        fields = {f.name: f for f in dataclasses.fields(params_type)}
        properties = {n: p for n, p in made.get("properties", {}).items() if fields[n].init}
        for name, text in docstrings.of_fields(params_type).items():
            if name in properties:
                properties[name]["description"] = text
        made |= {"properties": properties, "additionalProperties": False}
        if "description" in made:
            made["description"] = made["description"].partition("\n\nAttributes:")[0]
        return made


def require(*rules: tuple[bool, str]) -> None:
    """Hold a dataclass to rules: pairs of what must be true and how to say it, with the value.

    For a ``Params``' ``__post_init__``, so that all faults are told at once. A message that names
    the fields it is about is told with their lines.

    Raises:
        ValueError: With the messages of all rules that do not hold.
    """
    broken = [message for holds, message in rules if not holds]
    if broken:
        raise _BrokenRulesError(*broken)


class _BrokenRulesError(ValueError):
    def __str__(self) -> str:
        return "; ".join(self.args)


def near(name: str, names: Iterable[str]) -> str:
    """The names that are close to a mistyped one, for "did you mean ...?"; empty if none is.

    Upper and lower case are alike.
    """
    spelt: dict[str, list[str]] = {}
    for one in names:
        spelt.setdefault(one.casefold(), []).append(one)
    close = difflib.get_close_matches(str(name).casefold(), spelt, n=3, cutoff=0.6)
    return " or ".join(one for folded in close for one in spelt[folded])


def _as_json(config: Mapping[str, Any], origin: Origin) -> bytes:
    """A configuration as JSON.

    From JSON it is checked strictly (no number is made of a quoted string), and yet what neither
    YAML nor JSON has a type for (paths, enums, tuples, nested dataclasses) is built.
    """
    try:
        return pydantic_core.to_json(dict(config), inf_nan_mode="constants", fallback=_mapping)
    except pydantic_core.PydanticSerializationError as error:
        raise ConfigError(origin.fault(f"holds what no configuration can: {error}")) from None


def _mapping(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r}, a {type(value).__name__}")


@functools.lru_cache
def _adapter(params_type: Any) -> TypeAdapter[Any]:
    try:
        adapter = TypeAdapter(params_type)
        adapter.rebuild()  # raises what the line before puts off
        return adapter
    except (PydanticUserError, NameError) as error:
        raise PluginContractError(
            f"{params_type.__module__}.{params_type.__qualname__} has a field whose type cannot "
            f"be checked: {str(error).splitlines()[0]}"
        ) from error


def _faults(
    error: ValidationError, params_type: type, config: Mapping[str, Any], origin: Origin
) -> list[str]:
    """One message for each part that is wrong; the members of a union are told together."""
    messages: dict[Path, dict[str, Any]] = {}
    broken: list[str] = []
    for fault in error.errors(include_url=False):
        path = _part(fault, config)
        if fault["type"] in _OF_THE_WHOLE:
            raised, fields = fault["ctx"]["error"], _field_names(params_type, fault["loc"])
            rules = raised.args if isinstance(raised, _BrokenRulesError) else [str(raised)]
            broken += [origin.fault(rule, path, fields) for rule in rules]
        else:
            messages.setdefault(path, {})[_message(fault, params_type)] = fault
    return broken + [
        origin.fault(" or ".join(texts) + _got(next(iter(texts.values()))), path)
        for path, texts in messages.items()
    ]


def _message(fault: Any, params_type: type) -> str:
    if fault["type"] == "missing":
        return "is missing"
    if fault["type"] == "unexpected_keyword_argument":
        names = _field_names(params_type, fault["loc"][:-1])
        close = near(fault["loc"][-1], names)
        hint = f"did you mean {close}?" if close else f"known are {', '.join(names) or 'none'}"
        return f"is not a known parameter; {hint}"
    message: str = fault["msg"].replace("Input should", "must")
    for of_json, of_yaml in (("valid array", "list"), ("an object", "a mapping")):
        message = message.replace(of_json, of_yaml)
    return message[0].lower() + message[1:]


def _got(fault: Any) -> str:
    return "" if fault["type"] in _NAMES_A_KEY else f", got {fault['input']!r}"


def _part(fault: Any, config: Any) -> Path:
    """Where a fault stands in the configuration.

    pydantic's location also names the members of a union, which the user never wrote.
    """
    location: Sequence[str | int] = fault["loc"]
    path: list[str | int] = []
    for depth, key in enumerate(location, 1):
        try:
            config = config[key]
        except (LookupError, TypeError):
            if depth < len(location) or fault["type"] not in _NAMES_A_KEY:
                continue
        path.append(key)
    return tuple(path)


def _field_names(annotation: Any, location: Sequence[str | int]) -> list[str]:
    """The fields of the dataclass that stands at a location."""
    for key in location:
        hints = [typing.get_type_hints(t) for t in _dataclasses_in(annotation)]
        annotation = next((hint[key] for hint in hints if key in hint), annotation)
    fields = (f for t in _dataclasses_in(annotation) for f in dataclasses.fields(t) if f.init)
    return sorted({field.name for field in fields})


def _dataclasses_in(annotation: Any) -> list[Any]:
    if inspect.isclass(annotation) and dataclasses.is_dataclass(annotation):
        return [annotation]
    return [t for a in typing.get_args(annotation) for t in _dataclasses_in(a)]

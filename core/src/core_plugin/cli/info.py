"""``core-plugin info``."""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union

import typer

from core_plugin import config, params
from core_plugin.cli.arguments import Json
from core_plugin.cli.output import console, print_json
from core_plugin.errors import PluginNotFoundError
from core_plugin.plugin import BasePlugin


def info(
    name: Annotated[
        str,
        typer.Argument(
            help="A plugin's name, such as fsdp2, optimizer:muon or acme:muon.",
            show_default=False,
        ),
    ],
    as_json: Json = False,
) -> None:
    """Show a plugin: where it comes from, what it does, and its parameters."""
    found = [_describe(route) for route in _routes(name)]
    if as_json:
        print_json(found)
        return
    for plugin in found:
        _print(plugin)


def _print(plugin: dict[str, Any]) -> None:
    from rich.table import Table

    out = console()
    out.print(f"{plugin['type']} {plugin['name']}", style="bold", end="  ")
    out.print(plugin["origin"])
    for text in filter(None, (_for_users(plugin["doc"]), plugin["params_doc"])):
        out.print(text + "\n")
    if not plugin["params"]:
        out.print("no parameters")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("parameter", "type", "default"):
        table.add_column(title, overflow="fold")
    for field in plugin["params"]:
        table.add_row(field["name"], field["type"], field["default"])
    out.print(table)


def _for_users(doc: str) -> str:
    """A docstring without the sections that are for who calls the function."""
    return re.split(r"^(?:Args|Returns|Raises):$", doc, maxsplit=1, flags=re.MULTILINE)[0].rstrip()


def _routes(name: str) -> list[BasePlugin]:
    """The plugins of the name, in all types or in the one before it."""
    wanted, plain = config.split_name(name)
    types = {slot.plugin_type.type_name: slot.plugin_type for slot in config.SLOTS.values()}
    if wanted and wanted not in types:
        raise PluginNotFoundError(
            f"there is no plugin type {wanted!r}; the types are {', '.join(types)}"
        )
    chosen = [types[wanted]] if wanted else list(types.values())
    bare = plain.rpartition(":")[2]
    routes = [t(plain) for t in chosen if bare in t.names()]
    if not routes:
        everything = sorted({n for t in chosen for n in t.names()})
        close = params.near(bare, everything)
        hint = f"did you mean {close}?" if close else f"installed: {', '.join(everything)}"
        raise PluginNotFoundError(f"no plugin is called {name!r}; {hint}")
    return routes


def _describe(route: BasePlugin) -> dict[str, Any]:
    implementation, params_type = route.resolve(), route.params_type()
    distribution = route.registration().distribution
    schema = params.json_schema(params_type)  # first, as it says what is wrong with an annotation
    return {
        "type": type(route).type_name,
        "name": route.name,
        "origin": route.registration().origin,
        "distribution": distribution and distribution.name,
        "version": distribution and distribution.version,
        "doc": inspect.getdoc(implementation) or "",
        "params_doc": _own_doc(params_type),
        "params": list(_fields(params_type)),
        "schema": schema,
    }


def _own_doc(params_type: type) -> str:
    """The docstring, unless it is the signature that a dataclass gets for want of one."""
    doc = inspect.getdoc(params_type) or ""
    is_signature = doc.startswith(f"{params_type.__name__}(")
    return "" if is_signature or not list(_fields(params_type)) else doc


def _fields(
    params_type: Any, path: str = "", around: tuple[Any, ...] = ()
) -> Iterator[dict[str, str]]:
    """A row for each field, and below it one for each field of a dataclass that it holds."""
    hints = typing.get_type_hints(params_type)
    for field in dataclasses.fields(params_type):
        if not field.init:
            continue
        annotation = hints[field.name]
        yield {
            "name": path + field.name,
            "type": _type_name(annotation),
            "default": _default(field),
        }
        for steps, part in _parts(annotation):
            if part not in (*around, params_type):
                yield from _fields(part, f"{path}{field.name}.{steps}", (*around, params_type))


def _default(field: Any) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return "(required)"


def _parts(annotation: Any, steps: str = "") -> Iterator[tuple[str, Any]]:
    """The dataclasses in an annotation, each with the keys to it, such as ``0.`` in a list."""
    if inspect.isclass(annotation) and dataclasses.is_dataclass(annotation):
        yield steps, annotation
    key = {list: "0.", tuple: "0.", dict: "KEY."}.get(typing.get_origin(annotation), "")
    for argument in typing.get_args(annotation):
        yield from _parts(argument, steps + key)


def _type_name(annotation: Any) -> str:
    """An annotation as it is written, without the modules."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " | ".join(map(repr, arguments))
    if origin in (Union, types.UnionType):
        return " | ".join(map(_type_name, arguments))
    if inspect.isclass(origin) and not any(isinstance(one, list) for one in arguments):
        return f"{origin.__name__}[{', '.join(map(_type_name, arguments))}]"
    if annotation in (..., type(None)):
        return "..." if annotation is ... else "None"
    if inspect.isclass(annotation) and not arguments:
        return annotation.__name__
    return inspect.formatannotation(annotation)

"""``core-plugin schema``."""

import inspect
import json
import sys
from typing import Any

from core_plugin import config, discovery, params
from core_plugin.cli.output import print_json
from core_plugin.errors import CorePluginError
from core_plugin.plugin import BasePlugin


def schema() -> None:
    """Print the JSON schema of a run's YAML, for the plugins that are installed.

    Editors check and complete with it: put ``# yaml-language-server: $schema=schema.json`` into
    the YAML's first line.
    """
    print_json(run_schema())


def run_schema() -> dict[str, Any]:
    """The schema; plugins that cannot be loaded are left out, with a message."""
    definitions: dict[str, Any] = {}
    properties = {key: _slot_schema(slot, definitions) for key, slot in config.SLOTS.items()}
    required = []
    for key, params_type in config.SECTIONS.items():
        properties[key] = _inlined(params.json_schema(params_type), definitions, key)
        if properties[key].get("required"):
            required.append(key)
        else:
            properties[key]["type"] = ["object", "null"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "core-plugin run",
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        "$defs": definitions,
    }


def _slot_schema(slot: config.Slot, definitions: dict[str, Any]) -> dict[str, Any]:
    """A name, or a mapping with one of the names and its parameters; a list of them, or null."""
    bare: list[str] = []
    alternatives: list[dict[str, Any]] = [{"enum": bare}]
    for names, route in _spellings(slot.plugin_type):
        prefix = f"{slot.plugin_type.type_name}.{names[0]}"
        one = _inlined(params.json_schema(route.params_type()), definitions, prefix)
        says = (inspect.getdoc(route.resolve()) or "").partition("\n\n")[0].replace("\n", " ")
        one["properties"] = {"name": {"enum": names, "description": says}} | one["properties"]
        if not one.get("required"):
            bare += names
        one["required"] = ["name", *one.get("required", [])]
        alternatives.append(one)
    if slot.many:
        return {"type": "array", "items": {"anyOf": alternatives}}
    return {"anyOf": alternatives if slot.default else [{"type": "null"}, *alternatives]}


def _spellings(plugin_type: type[BasePlugin]) -> list[tuple[list[str], BasePlugin]]:
    """The names of each plugin, bare and qualified, with a route to it."""
    candidates = discovery.scan().group(plugin_type.group())
    qualified = sorted(c.qualified_name for c in candidates if not c.shadowed_by)
    found: dict[Any, tuple[list[str], BasePlugin]] = {}
    for name in [*plugin_type.names(), *qualified]:
        route = plugin_type(name)
        try:
            registration = route.registration()
        except CorePluginError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        key = registration.candidate or registration
        found.setdefault(key, ([], route))[0].append(name)
    return list(found.values())


def _inlined(one: dict[str, Any], definitions: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Move a schema's own definitions to the document's, under names that do not clash."""
    own = one.pop("$defs", {})
    text = json.dumps([one, own])
    for name in own:
        text = text.replace(f'"#/$defs/{name}"', f'"#/$defs/{prefix}.{name}"')
    one, own = json.loads(text)
    definitions |= {f"{prefix}.{name}": definition for name, definition in own.items()}
    return one

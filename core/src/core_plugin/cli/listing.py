"""``core-plugin list``."""

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from core_plugin import discovery, policy
from core_plugin.cli.arguments import Json
from core_plugin.cli.output import console, print_json
from core_plugin.config import PLUGIN_TYPES
from core_plugin.discovery import Candidate
from core_plugin.params import near


def list_plugins(
    plugin_type: Annotated[
        str | None, typer.Argument(help="Only this type, such as optimizer.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """List the installed plugins, from metadata alone: no plugin is imported.

    States: usable; conflict (two distributions have the name) and qualified (a built-in has it):
    write distribution:name; incompatible; denied; shadowed by another installation.
    """
    _check_type(plugin_type)
    rows = [row for row in _rows() if plugin_type in (None, row["type"])]
    if as_json:
        print_json(rows)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("type", "name", "distribution", "version", "origin", "state"):
        table.add_column(title, overflow="fold")
    for row in rows:
        reason = f": {row['reason']}" if row["reason"] else ""
        cells = [row[k] for k in ("type", "name", "distribution", "version", "origin")]
        table.add_row(*cells, row["state"] + reason, style="yellow" if reason else None)
    console().print(table)
    if problems := len(discovery.scan().problems):
        print(f"problems with installed metadata: {problems}; see doctor", file=sys.stderr)


def _check_type(plugin_type: str | None) -> None:
    known = set(PLUGIN_TYPES)
    known |= {c.type_name for c in discovery.scan().candidates}
    if plugin_type not in (None, *known):
        close = near(str(plugin_type), known)
        hint = f"did you mean {close}?" if close else f"there are {', '.join(sorted(known))}"
        raise typer.BadParameter(f"there is no plugin type {plugin_type!r}; {hint}")


def _rows() -> Iterator[dict[str, Any]]:
    for candidate in discovery.scan().candidates:
        state, reason = state_of(candidate)
        yield {
            "type": candidate.type_name,
            "name": candidate.name,
            "distribution": candidate.distribution.name,
            "version": candidate.distribution.version,
            "origin": candidate.value,
            "location": candidate.distribution.location,
            "state": state,
            "reason": reason,
        }


def state_of(candidate: Candidate) -> tuple[str, str | None]:
    """Whether a candidate would be used under its bare name, and if not, why."""
    if candidate.shadowed_by:
        return "shadowed", f"by {candidate.shadowed_by}"
    if denial := policy.active().denial(candidate.distribution):
        return "denied", denial
    if reason := discovery.incompatibility(candidate.distribution):
        return "incompatible", reason
    group = discovery.scan().group(candidate.group)
    contenders = policy.contenders(c for c in group if c.name == candidate.name)
    if candidate not in contenders:
        return "qualified", f"a built-in has the name; write {candidate.qualified_name}"
    others = [c.distribution.name for c in contenders if c != candidate]
    if others:
        return "conflict", f"with {', '.join(others)}; write {candidate.qualified_name}"
    return "usable", None

"""What several commands print in the same way."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def print_json(value: Any) -> None:
    """Print a value as JSON, for scripts."""
    json.dump(value, sys.stdout, indent=1, default=str)
    print()


def console() -> Console:
    """Where tables are printed: as wide as the terminal, and as wide as needed without one."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 100_000
    return console

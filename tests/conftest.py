"""What the tests that cross packages share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def packages(root: Path) -> list[Path]:
    """The folders of all packages of the repository."""
    folders = ("core", "plugins/*", "contrib/*")
    return [f.parent for g in folders for f in sorted(root.glob(f"{g}/pyproject.toml"))]

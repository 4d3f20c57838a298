"""The time to find and load one named plugin among 10, 100 and 1000 installed distributions.

core-plugin's ``OptimizerPlugin(name).resolve()`` against the standard library, importlib_metadata,
stevedore, pluggy and catalogue, on the same distributions: 5 have a plugin in the group, 31 % of
the others have entry points of other groups. Every measurement is a fresh process that sees only
those distributions; all ways take turns. Then ``core-plugin list``, in this environment.

Goals: at most half the standard library's time at 1000 distributions; ``core-plugin list`` in at
most 0.35 CPU seconds, and without torch.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from common import SCRIPTS, cpu_seconds, in_turns, machine, output, ratio, spread, table

if TYPE_CHECKING:
    from collections.abc import Mapping

GROUP, NAME = "core_plugin.optimizer", "wanted"
STANDARD = "importlib.metadata"

WAYS = {
    "core-plugin": (
        "from core_plugin.types import OptimizerPlugin",
        "OptimizerPlugin(NAME).resolve()",
    ),
    STANDARD: (
        "from importlib.metadata import entry_points",
        "tuple(entry_points(group=GROUP, name=NAME))[0].load()",
    ),
    "importlib_metadata": (
        "from importlib_metadata import entry_points",
        "tuple(entry_points(group=GROUP, name=NAME))[0].load()",
    ),
    "stevedore, no cache": (
        "from stevedore import DriverManager",
        "DriverManager(GROUP, NAME).driver",
    ),
    "stevedore, cached": (
        "from stevedore import DriverManager",
        "DriverManager(GROUP, NAME).driver",
    ),
    "pluggy": (
        "from pluggy import PluginManager; manager = PluginManager('bench')",
        "manager.load_setuptools_entrypoints(GROUP, NAME) and manager.get_plugin(NAME)",
    ),
    "catalogue (scans on import)": (
        "import catalogue",
        "catalogue.create(GROUP, entry_points=True).get(NAME)",
    ),
}

CHILD = """
import sys, time
sys.path[:0] = sys.argv[1:]
GROUP, NAME = {group!r}, {name!r}
started = time.process_time()
{setup}
imported = time.process_time()
found = {resolve}
done = time.process_time()
assert found.__module__ == "wanted_plugin", found
print(1e3 * (done - imported), 1e3 * (done - started))
"""

TORCH_AFTER_LIST = """
import sys
from core_plugin.cli import main
sys.argv = ["core-plugin", "list", "--json"]
try:
    main()
except SystemExit as end:
    assert not end.code
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""


def make_distributions(directory: Path, number: int) -> None:
    """Metadata directories as pip leaves them, and the module of the wanted plugin."""
    add_distribution(directory, "torch", "2.13.0", {})
    add_distribution(
        directory, "wanted", "1.0", {GROUP: f"{NAME} = wanted_plugin:optimizer"}, "core-plugin>=0.1"
    )
    for i in range(4):
        add_distribution(
            directory, f"rival-{i}", "1.0", {GROUP: f"rival-{i} = rival_{i}:optimizer"}
        )
    for i in range(number - 6):
        others = {
            "console_scripts": f"other-{i} = other_{i}:main",
            "pytest11": f"other-{i} = other_{i}.plugin",
        }
        add_distribution(directory, f"other-{i}", "1.0", others if i % 100 < 31 else {})
    module = "def optimizer(model, params):\n    return None\n"
    (directory / "wanted_plugin.py").write_text(module)


def add_distribution(
    directory: Path, name: str, version: str, entries: Mapping[str, str], *requires: str
) -> None:
    """One ``*.dist-info``."""
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {r}" for r in (*requires, "torch>=2.13")]
    (info / "METADATA").write_text("\n".join(lines) + "\n\n" + "What it is for.\n" * 200)
    (info / "RECORD").write_text(f"{name}.py,,\n")
    if entries:
        text = "\n".join(f"[{group}]\n{entry}\n" for group, entry in entries.items())
        (info / "entry_points.txt").write_text(text)


def link_libraries(directory: Path) -> None:
    """What this environment can import, without the metadata of it."""
    directory.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.suffix not in (".dist-info", ".egg-info", ".pth"):
            (directory / path.name).symlink_to(path)
    core = directory / "core_plugin"
    if not core.exists():
        core.symlink_to(Path(find_spec("core_plugin").origin).parent)


def time_one(way: str, distributions: Path, libraries: Path) -> tuple[float, float]:
    """CPU milliseconds of a fresh process: to resolve, and to import the framework and resolve."""
    setup, resolve = WAYS[way]
    code = CHILD.format(setup=setup, resolve=resolve, group=GROUP, name=NAME)
    cache = distributions.with_name(f"{distributions.name}-{way}") / "python-entrypoints"
    cache.mkdir(parents=True, exist_ok=True)
    if way == "stevedore, no cache":
        (cache / ".disable").touch()
    # stevedore does not cache where the interpreter is below /tmp, as an environment's may be
    python = os.path.realpath(sys.executable)
    command = [python, "-I", "-S", "-c", code, distributions, libraries]
    resolved, everything = output(command, {"XDG_CACHE_HOME": str(cache.parent)}).split()
    return float(resolved), float(everything)


def compare(number: int, repeats: int, root: Path) -> None:
    distributions = root / f"site-{number}"
    distributions.mkdir()
    make_distributions(distributions, number)
    variants = {
        way: functools.partial(time_one, way, distributions, root / "libraries") for way in WAYS
    }
    results = in_turns(variants, repeats)
    columns = {way: list(zip(*times, strict=True)) for way, times in results.items()}
    rows = [
        [
            way,
            spread(resolved),
            ratio(resolved, columns[STANDARD][0]),
            spread(everything),
            ratio(everything, columns[STANDARD][1]),
        ]
        for way, (resolved, everything) in columns.items()
    ]
    table(
        f"{number} distributions: CPU milliseconds, minimum / median of {repeats}",
        ["way", "resolve", "of the standard library's", "import and resolve", "of its"],
        rows,
    )


def measure_list(repeats: int) -> None:
    command = {"core-plugin list": lambda: cpu_seconds([SCRIPTS / "core-plugin", "list"])}
    times = in_turns(command, repeats)["core-plugin list"]
    output([sys.executable, "-c", TORCH_AFTER_LIST])
    table(
        f"The command: minimum / median of {repeats}",
        ["command", "CPU seconds", "imports torch"],
        [["core-plugin list", spread(times, 2), "no"]],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--numbers", type=int, nargs="+", default=[10, 100, 1000])
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        link_libraries(Path(name) / "libraries")
        for number in options.numbers:
            compare(number, options.repeats, Path(name))
    measure_list(options.repeats)


if __name__ == "__main__":
    main()

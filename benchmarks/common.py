"""What the benchmarks share: fresh processes, fair turns, and tables in Markdown."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

T = TypeVar("T")

HERE = Path(__file__).parent
SCRIPTS = Path(sys.executable).parent
"""Where this environment's console scripts are."""

PLUGINS = """\
[core_plugin.data]
random-tokens = bench_plugin:RandomTokens
[core_plugin.hook]
first-step = bench_plugin:first_step
by-hand = bench_plugin:by_hand
steps = bench_plugin:steps
saves = bench_plugin:saves
validation = bench_plugin:validation
"""


def output(command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> str:
    """Run a command and return what it prints; what it says on stderr is shown if it fails."""
    done = subprocess.run(
        command, env=os.environ | (env or {}), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def cpu_seconds(command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> float:
    """Run a command; the CPU seconds (user and system) of it and of the processes it waited for."""
    process = subprocess.Popen(command, env=os.environ | (env or {}), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command} failed")
    return usage.ru_utime + usage.ru_stime


def note_cpu(directory: Path, rank: int) -> None:
    """Write down the CPU seconds of this rank so far; rank 0 adds those of its launcher."""
    seconds = sum(os.times()[:4])
    if rank == 0:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    (directory / f"rank-{rank}").write_text(str(seconds))


def in_turns(variants: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Each variant's results: all of them in turn, there and back; a first turn is thrown away."""
    results: dict[str, list[T]] = {name: [] for name in variants}
    for turn in range(repeats + 1):
        for name in list(variants)[:: 1 if turn % 2 else -1]:
            result = variants[name]()
            if turn:
                results[name].append(result)
    return results


def spread(values: Iterable[float], digits: int = 1) -> str:
    """``minimum / median``."""
    values = list(values)
    return f"{min(values):.{digits}f} / {statistics.median(values):.{digits}f}"


def ratio(ours: Iterable[float], theirs: Iterable[float]) -> str:
    """The ratios of the minima and of the medians."""
    ours, theirs = list(ours), list(theirs)
    medians = statistics.median(ours) / statistics.median(theirs)
    return f"{min(ours) / min(theirs):.3f} / {medians:.3f}"


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    print(f"\n### {title}\n")
    for row in (header, ["---", *["---:"] * (len(header) - 1)], *rows):
        print("| " + " | ".join(row) + " |")
    sys.stdout.flush()


def machine() -> str:
    """What the figures were measured on."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return (
        f"{models[0]}, {len(models)} cores; Python {platform.python_version()}, "
        f"torch {importlib.metadata.version('torch')}; load {os.getloadavg()[0]:.1f}"
    )


def install_plugins(directory: Path) -> dict[str, str]:
    """Install :mod:`bench_plugin` for child processes, as a distribution; their environment."""
    info = directory / "bench_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(PLUGINS)
    path = [str(directory), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}

"""Fixtures of several test files: environments of fake distributions, and the command line."""

import base64
import hashlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("untimed", deadline=None)  # the machine may be busy
hypothesis.settings.load_profile("untimed")

sys.path.append(str(Path(__file__).parent))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under ``-m torchfree``, leave the files alone whose import may need torch."""
    if config.option.markexpr != "torchfree" or collection_path.suffix != ".py":
        return None
    return None if "mark.torchfree" in collection_path.read_text(encoding="utf-8") else True


class Site:
    """A directory as pip fills it: modules, and a metadata directory a distribution."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True)
        self.path = path

    def add(
        self,
        name: str,
        version: str = "1.0",
        *,
        entry_points: bytes | None = None,
        requires: tuple[str, ...] = (),
        modules: Mapping[str, str] = {},
        info: str | None = None,
        metadata: bool = True,
        **plugins: str,
    ) -> Path:
        """Put a distribution there, and return its metadata directory.

        Args:
            name: The distribution's name.
            version: Its version.
            entry_points: What is in ``entry_points.txt``, in place of ``plugins``.
            requires: What it requires.
            modules: Files by their names.
            info: The name of the metadata directory.
            metadata: Whether it has a METADATA.
            plugins: Lines of ``entry_points.txt`` by the plugin type's name.
        """
        directory = self.path / (info or f"{name.replace('-', '_')}-{version}.dist-info")
        directory.mkdir()
        if metadata:
            lines = [
                f"Name: {name}",
                f"Version: {version}",
                *(f"Requires-Dist: {r}" for r in requires),
            ]
            (directory / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines, ""]))
        if plugins:
            groups = (f"[core_plugin.{group}]\n{lines}\n" for group, lines in plugins.items())
            entry_points = "".join(groups).encode()
        if entry_points is not None:
            (directory / "entry_points.txt").write_bytes(entry_points)
        record = []
        for file, text in modules.items():
            (self.path / file).parent.mkdir(parents=True, exist_ok=True)
            (self.path / file).write_text(text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
            record.append(f"{file},sha256={digest.rstrip('=')},{len(text)}\n")
        (directory / "RECORD").write_text("".join(record))
        return directory


class Environment:
    """Site directories before all else on the path, of this process and of those it starts."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._monkeypatch = monkeypatch
        self.use()

    def site(self, name: str = "site") -> Site:
        """A new directory, which is searched before the earlier ones."""
        site = Site(self.root / name)
        self.use(site.path)
        return site

    def use(self, *directories: Path) -> None:
        """Put directories before the others, and scan anew."""
        self.only(*directories, *sys.path)

    def only(self, *entries: str | Path) -> None:
        """Search these alone, and scan anew."""
        from core_plugin import discovery

        path = [*map(str, entries)]
        self._monkeypatch.setattr(sys, "path", path)
        ours = (entry for entry in path if Path(entry).is_relative_to(self.root))
        self._monkeypatch.setenv("PYTHONPATH", os.pathsep.join(ours))
        discovery.forget()

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run Python."""
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=False,
        )

    def output(self, code: str, **variables: str) -> str:
        """What Python code prints."""
        done = self.run("-c", code, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Environment]:
    from core_plugin import discovery, policy

    for variable in ("CORE_PLUGIN_ALLOW", "CORE_PLUGIN_DENY", "PYTHONPATH"):
        monkeypatch.delenv(variable, raising=False)
    before = set(sys.modules)
    yield Environment(tmp_path, monkeypatch)
    monkeypatch.undo()
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if Path(file).is_relative_to(tmp_path):
            del sys.modules[name]
    policy.use(policy.Policy())
    discovery.forget()


CommandLine = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    """Runs ``core-plugin`` in this process: the exit code, and what it printed."""
    from core_plugin import cli

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        monkeypatch.setattr(sys, "argv", ["core-plugin", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return code, *capsys.readouterr()

    return run

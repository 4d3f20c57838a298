"""The tasks of the workspace; ``nox -l`` lists them. Arguments after ``--`` go to the task's tool.

Packages are found, not listed: every folder with a pyproject.toml in core, plugins and contrib.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import nox
from packaging.requirements import Requirement

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"

ROOT = Path(__file__).parent
WORKSPACE = nox.project.load_toml(ROOT / "pyproject.toml")


class Package(NamedTuple):
    """A distribution of this repository."""

    directory: Path
    project: dict[str, Any]
    groups: dict[str, list[str]]

    @property
    def name(self) -> str:
        return self.project["name"]

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def compiles(self) -> bool:
        """Whether it has code to compile: that is done once, and its wheel is installed."""
        return (self.directory / "setup.py").exists()

    @property
    def digest(self) -> str:
        """What its files are, in one number."""
        files = [self.directory / "setup.py", self.directory / "pyproject.toml"]
        sources = (self.directory / "src").rglob("*")
        files += sorted(f for f in sources if f.suffix in {".cpp", ".h", ".py"})
        return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:16]

    def closure(self, *groups: str) -> list[Package]:
        """The package, and those of this repository that it and its dependency groups need."""
        lists = (self.project["dependencies"], *(self.groups.get(name, []) for name in groups))
        needed = {Requirement(text).name for texts in lists for text in texts}
        below = [q for p in PACKAGES if p.name in needed for q in p.closure()]
        return list({p.name: p for p in (self, *below)}.values())


PACKAGES = [
    Package(file.parent, toml["project"], toml.get("dependency-groups", {}))
    for folder in ("core", "plugins/*", "contrib/*")
    for file in sorted(ROOT.glob(f"{folder}/pyproject.toml"))
    for toml in [nox.project.load_toml(file)]
]
SOURCES = [str(p.directory / "src") for p in PACKAGES]
TESTS = [str(d) for d in (*(p.directory / "tests" for p in PACKAGES), ROOT / "tests") if d.is_dir()]
TREE = ROOT / ".nox" / "tree"
FAULTS = ROOT / "tests" / "faults"
IN_PARALLEL = ("--numprocesses", "2", "--dist", "loadgroup")
NEEDS_ROOT = str(FAULTS / "test_faults_hosts.py")


def group(*names: str) -> tuple[str, ...]:
    """The requirements of dependency groups."""
    return nox.project.dependency_groups(WORKSPACE, *names)


def install(session: nox.Session, *requirements: str) -> None:
    """Install with the versions that the tests were run with.

    Python compiles what is imported, and no more than that.
    """
    constraints = str(ROOT / "constraints.txt")
    session.install("--no-compile", "--constraint", constraints, *requirements)


def install_tree(session: nox.Session, *requirements: str) -> None:
    """Install every package in place, but those that compile, and more."""
    install(session, *group("build"))
    in_place = [p for p in PACKAGES if not p.compiles]
    editable = [arg for p in in_place for arg in ("--editable", str(p.directory))]
    install(session, "--no-build-isolation", *editable, *requirements)


def in_tree(session: nox.Session, command: str, *arguments: str, **variables: str) -> None:
    """Run a command of the environment that the task ``tree`` makes."""
    place = TREE / "bin"
    variables["PATH"] = os.pathsep.join([str(place), os.environ["PATH"]])
    session.run(str(place / command), *arguments, env=variables, external=True)


def pytest_in_tree(session: nox.Session, *arguments: str, **variables: str) -> None:
    in_tree(session, "pytest", *arguments, OMP_NUM_THREADS="1", **variables)


def compiled_wheel(package: Package, run: Callable[..., object]) -> str:
    """The wheel of a package that compiles, built if its files have changed.

    ``run`` runs commands where torch and the build tools are: it is built without isolation.
    """
    place = ROOT / ".nox" / "wheels" / package.digest
    if not list(place.glob("*.whl")):
        options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(place)]
        run("pip", "wheel", *options, str(package.directory))
    (wheel,) = place.glob("*.whl")
    return str(wheel)


@nox.session(allow_parallel=True)
def lint(session: nox.Session) -> None:
    """Check style, format, and who imports whom."""
    install(session, *group("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    config = _import_contracts(Path(session.create_tmp()) / "pyproject.toml")
    path = os.pathsep.join(SOURCES)
    session.run("lint-imports", "--no-cache", str(config), env={"PYTHONPATH": path})


def _import_contracts(file: Path) -> Path:
    """The contracts of pyproject.toml, and one for all the packages that are there."""
    modules = [p.module for p in PACKAGES]
    plugins = " | ".join(m for m in modules if m != "core_plugin")
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    text = text.replace('root_packages = ["core_plugin"]', f"root_packages = {json.dumps(modules)}")
    file.write_text(
        f"""{text}
[[tool.importlinter.contracts]]
name = "a plugin imports core, and no other plugin; core imports no plugin"
type = "layers"
layers = ["{plugins}", "core_plugin"]
""",
        encoding="utf-8",
    )
    return file


@nox.session(default=False, allow_parallel=True)
def tree(session: nox.Session) -> None:
    """Make the environment of types, tests and benchmarks: every package in place."""
    install_tree(session, *group("test", "types"))


@nox.session(venv_backend="none", requires=["tree"], allow_parallel=True)
def types(session: nox.Session) -> None:
    """Check types, strictly."""
    in_tree(session, "mypy", *(session.posargs or SOURCES))


@nox.session(allow_parallel=True)
def tox(session: nox.Session) -> None:
    """Run core's torch-free tests on every Python that is installed, without torch."""
    install(session, *group("tox"))
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    pythons = os.pathsep.join(str(python) for python in pyenv.glob("versions/3.1[1-9]*/bin/python"))
    session.run("tox", *session.posargs, env={"TOX_DISCOVER": pythons})


@nox.session(venv_backend="none", requires=["tree"])
def tests(session: nox.Session) -> None:
    """Run all tests of all packages."""
    run = partial(in_tree, session)
    for package in (p for p in PACKAGES if p.compiles):
        run("pip", "install", "--no-deps", "--force-reinstall", compiled_wheel(package, run))
    pytest_in_tree(session, *(session.posargs or [*IN_PARALLEL, *TESTS]))


@nox.session(default=False, venv_backend="none", requires=["tree"])
def slow(session: nox.Session) -> None:
    """Run the tests that take minutes."""
    arguments = session.posargs or ["--ignore", NEEDS_ROOT, str(FAULTS)]
    pytest_in_tree(session, "-m", "slow", *arguments)


@nox.session(default=False, venv_backend="none", requires=["tree"])
def faults(session: nox.Session) -> None:
    """Interrupt 200 small runs at random moments, and let them go on; or those of some seeds."""
    seeds = " ".join(session.posargs or map(str, range(200)))
    random = str(FAULTS / "test_faults_random.py")
    pytest_in_tree(session, *IN_PARALLEL, random, FAULT_SEEDS=seeds)


@nox.session(default=False, venv_backend="none", requires=["tree"])
def hosts(session: nox.Session) -> None:
    """Cut one of two hosts off while both train; as root, for they are network namespaces."""
    pytest_in_tree(session, "-m", "slow", NEEDS_ROOT, *session.posargs)


@nox.session(default=False)
def quickstart(session: nox.Session) -> None:
    """Train a small model on Python's own language reference, in two processes."""
    install_tree(session, "core-plugin[plot]")
    directory = Path("runs", f"quickstart-{datetime.now():%Y%m%d-%H%M%S}")
    place = f"checkpoint.directory={directory}"
    session.run("core-plugin", "train", "examples/quickstart.yaml", place, *session.posargs)
    session.log("The run left:")
    for path in sorted((*directory.glob("[!.]*"), *directory.glob("checkpoints/*"))):
        session.log(f"  {path}")


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build the sdist and the wheel of every package, into dist/."""
    install(session, *group("build"), "torch")
    for package in PACKAGES:
        session.run("pyproject-build", "--no-isolation", "--outdir", "dist", str(package.directory))


@nox.session(default=False, reuse_venv=False)
@nox.parametrize("package", [nox.param(p, id=p.name) for p in PACKAGES])
def wheels(session: nox.Session, package: Package) -> None:
    """Run a package's tests from its wheel, in a fresh environment (slow)."""
    place = Path(session.create_tmp()).resolve()
    shutil.rmtree(place)
    place.mkdir()
    needed = package.closure("test")
    pure, names = [str(p.directory) for p in needed if not p.compiles], [p.name for p in needed]
    session.run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(place), *pure)
    session.install("--no-index", "--no-deps", *map(str, place.glob("*.whl")))
    install(session, "torch", *group("test"))
    for package_that_compiles in (p for p in needed if p.compiles):
        session.install("--no-deps", compiled_wheel(package_that_compiles, session.run))
    install(session, *names)
    session.run("pip", "check")
    shutil.copytree(package.directory / "tests", place / "tests")
    session.chdir(place)
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(place)]
    session.run("pytest", *settings, "tests", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False, venv_backend="none", requires=["tree"])
def bench(session: nox.Session) -> None:
    """Run the benchmarks."""
    scripts = (
        "discovery",
        "dispatch",
        "first_step",
        "step_time",
        "adapters",
        "checkpoints",
        "restart",
        "sharding",
    )
    for name in session.posargs or scripts:
        in_tree(session, "python", f"benchmarks/{name}.py")

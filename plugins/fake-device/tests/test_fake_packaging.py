import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETUP = ROOT / "setup.py"


def setup_py(before: str, **environment: str) -> str:
    """What ``setup.py`` ends with when something is not as it must be."""
    code = f"import runpy, sys; {before}; runpy.run_path({str(SETUP)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr.strip()


def test_without_torch_the_build_says_what_to_do() -> None:
    assert setup_py("sys.modules['torch'] = None") == (
        "core-plugin-fake-device is compiled for the torch that is installed, and none was found; "
        "pip install 'torch==2.13.*' setuptools, then pip install --no-build-isolation "
        "core-plugin-fake-device"
    )


def test_with_another_torch_the_build_says_what_to_do() -> None:
    message = setup_py("import torch; torch.__version__ = '2.12.1'")
    assert "needs torch 2.13, and torch 2.12.1 is installed; pip install 'torch==2.13.*'" in message


def test_without_a_compiler_the_build_says_what_to_do() -> None:
    message = setup_py("pass", CXX="no-such-compiler")
    assert "needs a C++ compiler, and no-such-compiler was not found; install g++" in message


def build(place: Path, source: Path, backend_call: str, before: str = "pass") -> Path:
    """The archive that a function of the build backend makes."""
    code = f"import sys; {before}; from setuptools import build_meta; build_meta.{backend_call}"
    command = [sys.executable, "-c", code, str(place)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (archive,) = place.iterdir()
    return archive


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked."""
    archive = build(tmp_path_factory.mktemp("sdist"), ROOT, "build_sdist(sys.argv[1])")
    place = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as file:
        file.extractall(place, filter="data")
    (directory,) = place.iterdir()
    return directory


def test_the_sdist_has_all_that_is_compiled_and_nothing_that_was(unpacked: Path) -> None:
    files = {str(p.relative_to(unpacked)) for p in unpacked.rglob("*") if p.is_file()}
    sources = {str(p.relative_to(ROOT)) for p in ROOT.glob("src/*/csrc/*")}
    assert len(sources) > 10
    assert sources | {"setup.py", "pyproject.toml", "README.md", "LICENSE"} <= files
    assert not [name for name in files if name.endswith((".so", ".o", ".pyc"))]


COMPILE_NOTHING = """
from pathlib import Path
from torch.utils.cpp_extension import BuildExtension
def build_extensions(self):
    for extension in self.extensions:
        file = Path(self.get_ext_fullpath(extension.name))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
BuildExtension.build_extensions = build_extensions
"""


def test_the_wheel_made_from_the_sdist_serves_every_python(unpacked: Path, tmp_path: Path) -> None:
    before = f"exec({COMPILE_NOTHING!r})"
    wheel = build(tmp_path, unpacked, "build_wheel(sys.argv[1])", before)
    assert "-cp311-abi3-" in wheel.name
    package = "core_plugin_fake_device"
    with zipfile.ZipFile(wheel) as file:
        names = {n.removeprefix(f"{package}/") for n in file.namelist() if ".dist-info/" not in n}
        (entry_points,) = (n for n in file.namelist() if n.endswith("entry_points.txt"))
        text = file.read(entry_points).decode()
    modules = {p.name for p in (ROOT / "src" / package).glob("*.py")}
    assert names == {*modules, "py.typed", "_device.so"}
    assert f"[core_plugin.device]\nfake = {package}.plugin:Fake" in text
    assert f"[torch.backends]\nfake = {package}.autoload:autoload" in text

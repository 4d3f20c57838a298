import json
import subprocess
import sys
from importlib import metadata

import pytest

from core_plugin_fake_device import plugin
from core_plugin_fake_device.plugin import Fake


def test_all_capabilities_are_declared_unless_they_are_switched_off() -> None:
    backend = Fake.backend(Fake.Params())
    assert (backend.name, backend.collective_backend) == ("fake", "fakeccl")
    assert set(vars(backend.capabilities).values()) == {True}
    lesser = Fake.backend(Fake.Params(devices=1, without=("streams",))).capabilities
    assert {n for n, on in vars(lesser).items() if not on} == {"multiple_devices", "streams"}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"devices": 0}, "devices must be from 1 to 16, got 0"),
        ({"devices": 17}, "devices must be from 1 to 16, got 17"),
        ({"memory_mb": 0}, "memory_mb must be at least 1 or null, got 0"),
        ({"without": ("stream",)}, "there is no capability stream; there are .*streams"),
    ],
)
def test_bad_parameters_are_explained(params: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fake.Params(**params)


def test_the_entry_point_does_not_import_torch() -> None:
    code = (
        "import sys, json; from core_plugin_fake_device.plugin import Fake; import "
        "core_plugin_fake_device.autoload; Fake.backend(Fake.Params()); "
        "print(json.dumps('torch' in sys.modules))"
    )
    assert json.loads(subprocess.check_output([sys.executable, "-c", code])) is False


def test_it_can_be_used_here() -> None:
    code = (
        "from core_plugin_fake_device.plugin import Fake; p = Fake.Params(); "
        "assert Fake.unavailable(p) is None, Fake.unavailable(p); "
        "assert Fake.initializations() == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_library_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(plugin, "LIBRARY", tmp_path / "_device.so")
    reason = Fake.unavailable(Fake.Params())
    assert reason == (
        f"its library {tmp_path / '_device.so'} is missing; pip install --no-build-isolation "
        "core-plugin-fake-device compiles it"
    )


def test_another_torch_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.14.1+cpu")
    assert Fake.unavailable(Fake.Params()) == (
        "it is compiled for torch 2.13, and torch 2.14.1+cpu is installed; "
        "pip install 'torch==2.13.*'"
    )


def test_no_torch_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    reason = Fake.unavailable(Fake.Params())
    assert reason == "torch is not installed; pip install 'torch==2.13.*'"


def test_a_broken_library_is_explained(tmp_path) -> None:
    library = tmp_path / "_device.so"
    library.write_bytes(b"\x7fELF")
    code = (
        "import pathlib, sys; from core_plugin_fake_device import plugin; "
        "plugin.LIBRARY = pathlib.Path(sys.argv[1]); "
        "print(plugin.Fake.unavailable(plugin.Fake.Params()))"
    )
    reason = subprocess.check_output([sys.executable, "-c", code, str(library)], text=True)
    assert reason.startswith(f"its library cannot be loaded: {library}: file too short; reinstall")

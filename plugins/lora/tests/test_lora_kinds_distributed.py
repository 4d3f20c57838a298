"""All kinds of layers in a group of real processes; see lora_kinds_processes.py."""

from pathlib import Path

from core_plugin.testing.children import run_script

SCRIPT = Path(__file__).with_name("lora_kinds_processes.py")


def test_two_processes_are_as_one(tmp_path: Path) -> None:
    run_script(SCRIPT, 2, tmp_path)

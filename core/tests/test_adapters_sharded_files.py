"""The files of an adapter that is sharded over real processes; see adapter_files_processes.py."""

from pathlib import Path

import pytest

from core_plugin.testing.children import run_script

SCRIPT = Path(__file__).with_name("adapter_files_processes.py")


@pytest.mark.parametrize("processes", [2, 3])
def test_files_do_not_depend_on_the_number_of_processes(processes: int, tmp_path: Path) -> None:
    run_script(SCRIPT, processes, tmp_path)

"""The elastic agent of the torchrun launcher, with workers that it forks."""

from pathlib import Path

from core_plugin.testing.children import run_script

SCRIPT = Path(__file__).with_name("agent_process.py")


def test_no_worker_begins_before_all_are_forked_at_a_restart_either(tmp_path):
    run_script(SCRIPT, tmp_path)
    attempts = [path.read_text().split() for path in sorted(tmp_path.glob("attempt-*"))]
    assert attempts == [["fork"] * 3 + ["begin"] * 3] * 2

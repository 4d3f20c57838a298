"""``core-plugin checkpoints``: what it shows, what it finds, and what it leaves alone."""

import hashlib
import json
import os
import shutil
import time

import pytest

from core_plugin.training import saved

pytestmark = pytest.mark.torchfree

MONTHS_AGO = 1_700_000_000


class SavedRun:
    """The directory of a run, with checkpoints of a few small files."""

    def __init__(self, path):
        self.path = path
        self.directory = path / "checkpoints"
        self.directory.mkdir(parents=True)

    def save(self, step, loss, **description):
        checkpoint = self.directory / f"step-{step:08d}"
        (checkpoint / "state").mkdir(parents=True)
        (checkpoint / "state" / "tensors").write_bytes(bytes([step]) * 1000)
        described = {"step": step, "loss": loss, "world_size": 2} | description
        (checkpoint / "run.json").write_text(json.dumps(described))
        files = {}
        for name in ("run.json", "state/tensors"):
            content = (checkpoint / name).read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            files[name] = {"size": len(content), "sha256": digest}
        (checkpoint / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))
        os.utime(checkpoint / "manifest.json", (MONTHS_AGO + step, MONTHS_AGO + step))
        return checkpoint

    def leave(self, name, changed=MONTHS_AGO):
        left = self.directory / name
        left.mkdir()
        (left / "tensors").write_bytes(b"half of")
        for path in (left / "tensors", left):
            os.utime(path, (changed, changed))

    def names(self):
        return sorted(path.name for path in self.directory.iterdir())


@pytest.fixture
def saved_run(tmp_path):
    run = SavedRun(tmp_path / "run")
    for step, loss in enumerate([3.0, 1.0, 2.5, None, 2.0], 1):
        run.save(step, loss)
    return run


def flip(checkpoint):
    (checkpoint / "state" / "tensors").write_bytes(b"x" * 1000)


def cut(checkpoint):
    (checkpoint / "state" / "tensors").write_bytes(b"x")


def step(number):
    return f"step-{number:08d}"


def test_the_list_shows_each_with_its_loss_and_marks_the_newest_and_the_best(
    saved_run, command_line
):
    code, out, err = command_line("checkpoints", "list", str(saved_run.path))
    assert (code, err) == (0, "")
    header, *lines = out.splitlines()
    assert header.split() == ["step", "loss", "size", "ranks", "written", "state"]
    cells = [line.split() for line in lines]
    written = [time.strftime("%Y-%m-%d", time.localtime(MONTHS_AGO + n)) for n in range(1, 6)]
    assert [(c[0], c[1]) for c in cells if c[0] != "4"] == [
        ("1", "3"),
        ("2", "1"),
        ("3", "2.5"),
        ("5", "2"),
    ]
    assert all(date in line for date, line in zip(written, lines, strict=True))
    assert all("1.3 kB" in line and "complete" in line for line in lines)
    assert [line.split("complete")[1].strip() for line in lines] == ["", "best", "", "", "newest"]


def test_the_list_says_what_is_not_complete_and_does_not_mark_it(saved_run, command_line):
    cut(saved_run.directory / step(5))
    cut(saved_run.directory / step(2))
    (saved_run.directory / step(1) / "manifest.json").unlink()
    (saved_run.directory / step(1) / "run.json").write_text("[")
    rows = json.loads(command_line("checkpoints", "list", str(saved_run.path), "--json")[1])
    assert [row["step"] for row in rows if row["faults"]] == [1, 2, 5]
    assert rows[4]["faults"] == ["state/tensors has 1 bytes, not 1000"]
    assert [row["marks"] for row in rows] == [[], [], ["best"], ["newest"], []]
    assert (rows[0]["loss"], rows[0]["ranks"]) == (None, None)
    _, out, _ = command_line("checkpoints", "list", str(saved_run.path))
    assert "broken; state/tensors has 1 bytes, not 1000" in out


def test_verify_reads_the_content_of_all_and_exits_with_every_fault(saved_run, command_line):
    assert command_line("checkpoints", "verify", str(saved_run.path))[::2] == (0, "")
    flip(saved_run.directory / step(1))
    cut(saved_run.directory / step(4))
    code, out, err = command_line("checkpoints", "verify", str(saved_run.path))
    assert code == 1
    assert out.count(": whole\n") == 3
    assert out.count(": broken\n") == 2
    assert "state/tensors has another content than was written (SHA-256)" in err
    assert "state/tensors has 1 bytes, not 1000" in err
    one = saved_run.directory / step(2)
    assert command_line("checkpoints", "verify", str(one)) == (0, f"{one}: whole\n", "")
    assert command_line("checkpoints", "verify", str(saved_run.directory / step(1)))[0] == 1


def test_prune_keeps_the_newest_and_the_best_and_removes_what_is_left_over(saved_run, command_line):
    saved_run.leave(f".partial-{step(6)}")
    saved_run.leave(f".removed-{step(0)}")
    before = saved_run.names()
    arguments = ("checkpoints", "prune", str(saved_run.path), "--keep", "2")
    code, out, err = command_line(*arguments, "--dry-run")
    assert (code, err) == (0, "")
    assert saved_run.names() == before
    doomed = [line.split()[2] for line in out.splitlines() if line.startswith("would remove")]
    code, out, err = command_line(*arguments)
    assert (code, err) == (0, "")
    assert saved_run.names() == [step(2), step(4), step(5)]
    assert [line.split()[1] for line in out.splitlines() if line.startswith("removing")] == doomed
    assert [path.rpartition("/")[2] for path in doomed] == [
        step(1),
        step(3),
        f".partial-{step(6)}",
        f".removed-{step(0)}",
    ]


def test_prune_counts_no_broken_one_and_leaves_it_alone(saved_run, command_line):
    flip(saved_run.directory / step(5))
    flip(saved_run.directory / step(2))
    code, _, err = command_line("checkpoints", "prune", str(saved_run.path), "--keep", "1")
    assert code == 0
    assert saved_run.names() == [step(2), step(3), step(4), step(5)]
    assert f"{step(5)} is broken, and left alone: state/tensors has another content" in err
    assert f"{step(2)} is broken, and left alone" in err


def test_prune_removes_nothing_where_none_is_whole(saved_run, command_line):
    before = saved_run.names()
    for number in range(1, 6):
        flip(saved_run.directory / step(number))
    code, _, err = command_line("checkpoints", "prune", str(saved_run.path), "--keep", "1")
    assert code == 1
    assert "is whole: nothing is removed" in err
    assert saved_run.names() == before


def test_a_manifest_or_file_that_cannot_be_read_is_told(saved_run, command_line, monkeypatch):
    manifest = saved_run.directory / step(1) / "manifest.json"
    manifest.write_text(manifest.read_text().replace("size", "sizE", 1))
    unreadable = saved_run.directory / step(2) / "state" / "tensors"
    sha256 = saved.sha256

    def read(file):
        if file == unreadable:
            raise OSError(5, "Input/output error")
        return sha256(file)

    monkeypatch.setattr(saved, "sha256", read)
    rows = json.loads(command_line("checkpoints", "list", str(saved_run.path), "--json")[1])
    assert rows[0]["faults"] == [f"{manifest} cannot be read (KeyError: 'size')"]
    code, _, err = command_line("checkpoints", "verify", str(saved_run.path))
    assert code == 1
    assert f"{manifest} cannot be read (KeyError: 'size')" in err
    assert "state/tensors cannot be read ([Errno 5] Input/output error)" in err
    assert "Traceback" not in err


def test_what_a_run_has_set_aside_is_listed_last_and_pruned(saved_run, command_line):
    aside = saved_run.directory / step(2)
    aside.rename(aside.with_name(f"broken-{step(2)}"))
    rows = json.loads(command_line("checkpoints", "list", str(saved_run.path), "--json")[1])
    assert [row["step"] for row in rows] == [1, 3, 4, 5, 2]
    assert rows[-1]["faults"] == [f"set aside as broken-{step(2)}"]
    assert rows[-1]["marks"] == []
    _, out, _ = command_line("checkpoints", "list", str(saved_run.path))
    assert f"broken; set aside as broken-{step(2)}" in " ".join(out.split())
    arguments = ("checkpoints", "prune", str(saved_run.path), "--keep", "4")
    code, out, err = command_line(*arguments)
    assert (code, err) == (0, "")
    assert f"broken-{step(2)} (" in out
    assert saved_run.names() == [step(1), step(3), step(4), step(5)]


def test_what_is_set_aside_stays_where_no_other_is_whole(saved_run, command_line):
    for number in range(1, 6):
        aside = saved_run.directory / step(number)
        aside.rename(aside.with_name(f"broken-{step(number)}"))
    before = saved_run.names()
    assert command_line("checkpoints", "prune", str(saved_run.path), "--keep", "1")[0] == 0
    assert saved_run.names() == before


def test_what_a_run_removes_meanwhile_is_passed_over(saved_run, command_line, monkeypatch):
    verify, left_over = saved.verify, saved.left_over

    def verify_and_lose(path, **options):
        faults = verify(path, **options)
        if path.name == step(1):
            shutil.rmtree(path)
            return ["run.json is missing"]
        return faults

    monkeypatch.setattr(saved, "verify", verify_and_lose)
    code, out, err = command_line("checkpoints", "list", str(saved_run.path), "--json")
    assert (code, err) == (0, "")
    assert [row["step"] for row in json.loads(out)] == [2, 3, 4, 5]
    monkeypatch.setattr(saved, "verify", verify)
    gone = saved_run.directory / f".removed-{step(1)}"
    monkeypatch.setattr(saved, "left_over", lambda directory: [gone, *left_over(directory)])
    rmtree = shutil.rmtree

    def lose_and_remove(path, **options):
        rmtree(path)
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", lose_and_remove)
    saved_run.leave(f".partial-{step(6)}")
    code, _, err = command_line("checkpoints", "prune", str(saved_run.path), "--keep", "4")
    assert code == 0
    assert "Traceback" not in err
    assert saved_run.names() == [step(2), step(3), step(4), step(5)]


def test_stamps_pass_over_what_vanishes(saved_run):
    checkpoint = saved_run.directory / step(1)
    before = saved.stamps(checkpoint)
    (checkpoint / "gone").symlink_to(checkpoint / "nowhere")
    assert saved.stamps(checkpoint) == before
    assert len(before) == 3


def test_prune_leaves_a_save_that_goes_on_alone(saved_run, command_line):
    saved_run.leave(f".partial-{step(6)}", changed=time.time())
    code, _, err = command_line("checkpoints", "prune", str(saved_run.path), "--keep", "5")
    assert code == 0
    assert f".partial-{step(6)} has changed" in err
    assert "a run may be at it" in err
    assert f".partial-{step(6)}" in saved_run.names()


@pytest.mark.parametrize("command", [["list"], ["verify"], ["prune", "--keep", "1"]])
def test_what_is_no_run_is_a_mistake_without_a_traceback(tmp_path, command_line, command):
    for path in (tmp_path, tmp_path / "nowhere"):
        code, _, err = command_line("checkpoints", *command, str(path))
        assert code == 2
        assert err == f"error: {path} is not the directory of a run: it has no checkpoints in it\n"


def test_a_run_must_keep_at_least_one(saved_run, command_line):
    code, _, err = command_line("checkpoints", "prune", str(saved_run.path), "--keep", "0")
    assert code == 2
    assert "--keep" in err
    assert len(saved_run.names()) == 5


def test_each_command_documents_its_arguments(command_line, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for command, words in {
        "list": ["--json"],
        "verify": ["RUN|CHECKPOINT"],
        "prune": ["--keep", "--dry-run", "Kept are", "in this order", "the oldest first"],
    }.items():
        page = command_line("checkpoints", command, "--help")[1]
        assert all(word in page for word in words)


def test_no_command_needs_torch(saved_run, environment):
    code = (
        "import sys\nfrom core_plugin.cli import main\n"
        "for arguments in (['list'], ['verify'], ['prune', '--keep', '1']):\n"
        f"    sys.argv = ['core-plugin', 'checkpoints', *arguments, {str(saved_run.path)!r}]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code, end\n"
        "print('torch' in sys.modules)\n"
    )
    assert environment.output(code).splitlines()[-1] == "False"

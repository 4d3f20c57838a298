"""The commands that need no torch: what they print, and what they exit with."""

import json
import os
import re
import subprocess
import sys

import jsonschema
import pytest

from core_plugin import __version__, config
from core_plugin.cli.schema import run_schema
from core_plugin.types import OptimizerPlugin

pytestmark = pytest.mark.torchfree

OPTIMIZER = '''
from dataclasses import dataclass, field
from typing import Literal

@dataclass(frozen=True)
class Inner:
    depth: int

@dataclass(frozen=True)
class Params:
    """How it steps.

    Attributes:
        lr: The rate [1/step].
    """

    lr: float
    kind: Literal["a", "b"] = "a"
    betas: tuple[float, float] = (0.9, 0.95)
    inner: Inner | None = None
    names: list[str] = field(default_factory=lambda: ["x"])
    derived: int = field(init=False, default=2)

def optimizer(model, params: Params):
    """Steps [carefully]."""
'''
SCHEDULER = '''
from dataclasses import dataclass

@dataclass(frozen=True)
class Base:
    ratio: float = 0.1
    """Where it ends,
    as a share of what it begins with.
    """

@dataclass(frozen=True)
class Params(Base):
    """How it falls.

    Attributes:
        end (int or None): The last step:
            none for the run's.

    What comes after: is no attribute.
    """

    end: int | None = None

def line(optimizer, params: Params, *, steps):
    """Falls."""
'''
RUN = {
    "data": {"name": "text", "path": "x"},
    "hooks": [],
    "train": {"steps": 3},
}


@pytest.fixture
def acme(environment):
    """A site with a plugin called acme, of acme-dist."""
    site = environment.site()
    site.add(
        "acme-dist",
        "1.2",
        optimizer="acme = acme_opt:optimizer",
        modules={"acme_opt.py": OPTIMIZER},
    )
    return site


@pytest.fixture
def run_file(tmp_path):
    def run_file(**changes):
        file = tmp_path / "run.yaml"
        file.write_text(json.dumps(RUN | changes))
        return file

    return run_file


def rows(command_line, *arguments) -> dict[str, dict[str, str]]:
    code, out, _ = command_line("list", "--json", *arguments)
    assert code == 0
    return {f"{r['distribution']}:{r['name']}": r for r in json.loads(out)}


def test_list_tells_the_state_of_every_plugin(environment, command_line, monkeypatch) -> None:
    old, site = environment.site("old"), environment.site("site")
    site.add("one", optimizer="only = m:o\nboth = m:o")
    site.add("two", optimizer="both = m:o\nadamw = m:o")
    site.add("three", optimizer="late = m:o", requires=("core-plugin>=9",))
    site.add("four", optimizer="kept_out = m:o")
    old.add("one", "0.1", optimizer="only = m:o")
    monkeypatch.setenv("CORE_PLUGIN_DENY", "four")
    listed = json.loads(command_line("list", "optimizer", "--json")[1])
    states = {
        (r["distribution"], r["name"], r["version"]): (r["state"], r["reason"]) for r in listed
    }
    new = site.path / "one-1.0.dist-info"
    assert (
        states.items()
        >= {
            ("one", "only", "1.0"): ("usable", None),
            ("one", "only", "0.1"): ("shadowed", f"by {new}"),
            ("one", "both", "1.0"): ("conflict", "with two; write one:both"),
            ("two", "both", "1.0"): ("conflict", "with one; write two:both"),
            ("two", "adamw", "1.0"): ("qualified", "a built-in has the name; write two:adamw"),
            ("core-plugin", "adamw", __version__): ("usable", None),
            ("three", "late", "1.0"): (
                "incompatible",
                f"requires core-plugin>=9, but core-plugin {__version__} is installed",
            ),
            ("four", "kept_out", "1.0"): ("denied", "CORE_PLUGIN_DENY has four"),
        }.items()
    )
    assert {r["type"] for r in listed} == {"optimizer"}
    _, out, err = command_line("list")
    assert re.search(r"optimizer +both +one +1\.0 +m:o +conflict: with two; write one:both", out)
    assert err == "problems with installed metadata: 1; see doctor\n"


def test_the_table_is_as_wide_as_needed_without_a_terminal(environment, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    value = "a_package_with_a_long_name.and_a_module_with_one:AndAClass [extra]"
    environment.site().add("acme", optimizer=f"acme = {value}")
    done = environment.run("-m", "core_plugin", "list")
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if " acme " in line]
    assert value in line
    assert len(line) < 300


def test_list_of_a_type_that_does_not_exist_is_a_usage_error(command_line) -> None:
    code, out, err = command_line("list", "optimzer")
    assert (code, out) == (2, "")
    assert "did you mean optimizer?" in " ".join(err.split())
    assert command_line("list", "kernel")[0] == 0


def test_listing_imports_no_plugin(acme, command_line) -> None:
    rows(command_line)
    assert "acme_opt" not in sys.modules


def test_info_shows_where_a_plugin_is_from_and_its_parameters(acme, command_line) -> None:
    for before in ("", "optimizer/", "optimizer:"):
        for name in ("acme", "acme-dist:acme"):
            code, out, _ = command_line("info", before + name)
            assert code == 0
            assert re.match(rf"optimizer {name} +acme_opt:optimizer of ", out)
        assert "acme-dist 1.2" in out
    assert "Steps [carefully]." in out
    assert "lr: The rate [1/step]." in out
    assert re.search(r"\nlr +float +\(required\)", out)
    assert re.search(r"\nbetas +tuple\[float, float\] +\(0\.9, 0\.95\)", out)
    assert re.search(r"\nnames +list\[str\] +\['x'\]", out)
    assert "derived" not in out
    code, out, _ = command_line("info", "acme", "--json")
    (plugin,) = json.loads(out)
    assert plugin["schema"]["required"] == ["lr"]
    assert plugin["distribution"] == "acme-dist"
    assert command_line("info", "none")[1].rstrip().endswith("no parameters")


def test_info_shows_all_types_that_have_the_name(command_line) -> None:
    code, out, _ = command_line("info", "jsonl", "--json")
    assert code == 0
    assert {plugin["type"] for plugin in json.loads(out)} >= {"data", "hook"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adamv", "no plugin is called 'adamv'; did you mean adamw"),
        ("optimizer/cosine", "no plugin is called 'optimizer/cosine'; installed: "),
        ("optimizer:cosine", "no plugin is called 'optimizer:cosine'; installed: "),
        ("optimiser/adamw", "there is no plugin type 'optimiser'; the types are "),
        ("none-such:adamw", "no OptimizerPlugin is called 'none-such:adamw'"),
    ],
)
def test_info_of_what_does_not_exist(command_line, name, message) -> None:
    code, out, err = command_line("info", name)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert "Traceback" not in err


def test_info_of_what_does_not_load(environment, command_line) -> None:
    environment.site().add("bad", optimizer="bad = bad_opt:x", modules={"bad_opt.py": "1 / 0"})
    code, _, err = command_line("info", "bad")
    assert code == 1
    assert err.startswith("error: OptimizerPlugin('bad') (bad_opt:x of bad 1.0 (")
    assert err.rstrip().endswith("cannot be imported: ZeroDivisionError: division by zero")


def test_doctor_tells_every_problem_with_its_file_and_the_fix(
    environment, command_line, monkeypatch
) -> None:
    site = environment.site()
    late = site.add("late", optimizer="late = m:o", requires=("core-plugin>=9",))
    one = site.add("one", optimizer="both = m:o")
    two = site.add("two", optimizer="both = m:o")
    typo = site.add("typo", optimiser="x = m:o")
    site.add("own", breadmaker="x = m:o")
    text = site.add("text", entry_points=b"[core_plugin.optimizer]\nbad\n")
    monkeypatch.setenv("CORE_PLUGIN_ALLOW", "late,one,two,typo,own,txet")
    code, out, _ = command_line("doctor", "--json")
    assert code == 1
    found = json.loads(out)
    assert set(found["versions"]) == {"core-plugin", "python", "torch"}
    fixes = {p["location"]: p["fix"] for p in found["problems"]}
    assert fixes == {
        str(late): "install a version of late that fits",
        str(one): "write name: one:both, or uninstall one of them",
        str(two): "write name: two:both, or uninstall one of them",
        str(typo): "did the author mean optimizer?",
        f"{text / 'entry_points.txt'}:2": "tell the package's author, or re-install",
        "the environment": "correct the list",
    }
    code, out, _ = command_line("doctor")
    assert out.rstrip().endswith("problems: 6")


def test_doctor_loads_only_when_asked_and_then_what_may_be_used(
    environment, command_line, monkeypatch
) -> None:
    site = environment.site()
    bad = site.add(
        "bad", optimizer="bad = bad_opt:x", modules={"bad_opt.py": "raise SystemExit(3)"}
    )
    site.add("out", optimizer="out = kept_out:x", modules={"kept_out.py": "raise SystemExit(3)"})
    monkeypatch.setenv("CORE_PLUGIN_DENY", "out")
    assert command_line("doctor")[0] == 0
    code, out, _ = command_line("doctor", "--load")
    assert code == 1
    assert f"{bad}\n  OptimizerPlugin('bad:bad') (bad_opt:x of bad 1.0 ({bad})) cannot be" in out
    assert "fix: re-install or upgrade bad" in out
    assert "kept_out" not in out
    assert "kept_out" not in sys.modules


def valid(schema, document) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(document))


def test_the_schema_says_what_validating_says(acme) -> None:
    schema = run_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    documents = [
        RUN,
        RUN | {"optimizer": "sgd", "peft": None, "checkpoint": None},
        RUN | {"optimizer": {"name": "acme", "lr": 1, "kind": "b", "inner": {"depth": 2}}},
        RUN | {"optimizer": {"name": "acme-dist:acme", "lr": 0.1, "betas": [0, 1], "inner": None}},
        RUN | {"optimizer": "core-plugin:adamw", "hooks": ["jsonl", {"name": "progress"}]},
        RUN | {"checkpoint": {"every": None}, "plugins": {"deny": ["x"]}},
        config.resolve(RUN | {"optimizer": {"name": "acme", "lr": 1}}).resolved(),
        RUN | {"optimizer": "acme"},
        RUN | {"optimizer": "acmee"},
        RUN | {"optimizer": {"name": "acme", "lr": "1"}},
        RUN | {"optimizer": {"name": "acme", "lr": 1, "knid": "a"}},
        RUN | {"optimizer": {"name": "acme", "lr": 1, "kind": "c"}},
        RUN | {"optimizer": {"name": "acme", "lr": 1, "betas": [1]}},
        RUN | {"optimizer": {"name": "acme", "lr": 1, "inner": {"depth": 2, "x": 1}}},
        RUN | {"optimizer": {"name": "acme", "lr": 1, "derived": 3}},
        RUN | {"optimizer": {"lr": 1}},
        RUN | {"optimizer": None},
        RUN | {"optimzer": "sgd"},
        RUN | {"hooks": "jsonl"},
        RUN | {"hooks": ["jsnl"]},
        RUN | {"train": {"steps": 3, "seeds": 1}},
        RUN | {"train": {}},
        RUN | {"train": None},
    ]
    told = []
    for document in documents:
        try:
            config.resolve(document)
            told.append(True)
        except config.ConfigError:
            told.append(False)
    assert told == [True] * 7 + [False] * 16
    assert [valid(schema, document) for document in documents] == told


def test_the_schema_leaves_out_what_does_not_load_and_names_conflicts_apart(
    environment, command_line
) -> None:
    site = environment.site()
    modules = {"bad_opt.py": "1 / 0", "good_opt.py": OPTIMIZER}
    site.add("one", optimizer="bad = bad_opt:x\nboth = good_opt:optimizer", modules=modules)
    site.add("two", optimizer="both = good_opt:optimizer\nadamw = good_opt:optimizer")
    OptimizerPlugin("in_process").register(override=True)(lambda model, params: None)
    code, out, err = command_line("schema")
    assert code == 0
    schema = json.loads(out)
    assert "left out: OptimizerPlugin('bad')" in err
    for name, right in (("one:both", True), ("two:both", True), ("two:adamw", True)):
        assert valid(schema, RUN | {"optimizer": {"name": name, "lr": 1}}) == right
    for name in ("both", "bad", "one:bad"):
        assert not valid(schema, RUN | {"optimizer": {"name": name, "lr": 1}})
    assert valid(schema, RUN | {"optimizer": "in_process"})


def described(schema) -> dict[str, str]:
    return {name: one.get("description") for name, one in schema["properties"].items()}


def test_the_schema_describes_every_key_as_the_docstrings_do(environment) -> None:
    modules = {"acme_opt.py": OPTIMIZER, "acme_sched.py": SCHEDULER}
    plugins = {"optimizer": "acme = acme_opt:optimizer", "scheduler": "acme = acme_sched:line"}
    environment.site().add("acme-dist", modules=modules, **plugins)
    schema = run_schema()["properties"]
    train = described(schema["train"])
    assert train["steps"] == "Optimizer steps."
    assert train["hang_timeout"] == (
        "Seconds without progress after which the run ends and says which rank is where; null "
        "waits for ever."
    )
    assert all(train.values())
    assert all(described(schema["checkpoint"]).values())
    assert schema["train"]["description"] == "How long and how to train."
    optimizer, scheduler = (
        next(one for one in schema[key]["anyOf"] if "acme" in str(one.get("properties")))
        for key in ("optimizer", "scheduler")
    )
    assert described(optimizer) | {"inner": None} == {
        "name": "Steps [carefully].",
        "lr": "The rate [1/step].",
        **dict.fromkeys(("kind", "betas", "inner", "names")),
    }
    assert described(scheduler)["ratio"] == "Where it ends, as a share of what it begins with."
    assert described(scheduler)["end"] == "The last step: none for the run's."


def test_validate_says_whether_a_file_is_valid(run_file, command_line) -> None:
    code, out, err = command_line("validate", run_file(), "optimizer=sgd", "train.seed=2")
    assert (code, err) == (0, "")
    assert out.endswith("run.yaml is valid\n")
    code, out, _ = command_line("validate", run_file(), "train.seed=2", "--json")
    document = json.loads(out)
    assert (code, document["valid"], document["config"]["train"]["seed"]) == (0, True, 2)


def test_validate_tells_every_fault(run_file, command_line) -> None:
    file = run_file(optimizer="adamv", hooks=["jsnl"])
    code, out, err = command_line("validate", file, "train.seed=x")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("did you mean") == 2
    assert "override 'train.seed=x': train.seed: must be a valid integer" in err
    assert "Traceback" not in err
    code, out, _ = command_line("validate", file, "train.seed=x", "--json")
    assert code == 2
    assert json.loads(out)["valid"] is False
    assert len(json.loads(out)["faults"]) == 3


def faults_told(command_line, file, *overrides) -> list[str]:
    code, out, _ = command_line("validate", file, *overrides, "--json")
    assert code == 2
    return [fault.replace(f"{file}", "run.yaml") for fault in json.loads(out)["faults"]]


def test_what_the_parameters_themselves_object_to_is_told_where_the_value_is(
    tmp_path, command_line
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "data: {name: text, path: x}\nhooks: []\ntrain:\n  steps: 3\n"
        "  micro_batch_size: 1\nscheduler: {name: cosine}\n"
    )

    def told(*overrides):
        return faults_told(command_line, file, *overrides)

    assert told("train.steps=0", "train.log_every=0") == [
        "override 'train.steps=0': train: steps must be at least 1, got 0",
        "override 'train.log_every=0': train: log_every must be at least 1, got 0",
    ]
    assert told("optimizer.lr=-1") == [
        "override 'optimizer.lr=-1': optimizer: lr must be above 0, got -1.0"
    ]
    assert told("train.global_batch_size=4", "train.micro_batch_size=8") == [
        "override 'train.micro_batch_size=8', override 'train.global_batch_size=4': "
        "train: micro_batch_size (8) is larger than global_batch_size (4)"
    ]
    assert told("train={steps: 3, global_batch_size: 0}")[0].startswith(
        "override 'train={steps: 3, global_batch_size: 0}': train: global_batch_size must be"
    )
    (fault,) = told("scheduler.warmup_steps=7")
    assert fault.startswith("override 'scheduler.warmup_steps=7': scheduler: warmup_steps")
    file.write_text(file.read_text().replace("micro_batch_size: 1", "micro_batch_size: 16"))
    larger = "train: micro_batch_size (16) is larger than global_batch_size"
    assert told() == [f"run.yaml:5: {larger} (8)"]
    assert told("train.global_batch_size=4") == [
        f"run.yaml:5, override 'train.global_batch_size=4': {larger} (4)"
    ]


def test_a_fault_of_several_lines_stays_one_in_json(environment, run_file, command_line) -> None:
    site = environment.site()
    for name in ("one", "two"):
        site.add(name, optimizer="both = m:o")
    code, out, _ = command_line("validate", run_file(optimizer="both"), "--json")
    (fault,) = json.loads(out)["faults"]
    assert code == 2
    assert "one:both" in fault
    assert "\n" in fault


@pytest.mark.parametrize(
    "arguments",
    [
        ("validate",),
        ("validate", "none.yaml"),
        ("validate", "."),
        ("validate", "run.yaml", "--no-such-option"),
        ("no-such-command",),
        ("info",),
        ("list", "one", "two"),
    ],
)
def test_usage_and_configuration_faults_exit_with_2_and_no_traceback(
    arguments, run_file, command_line, monkeypatch, tmp_path
) -> None:
    run_file()
    monkeypatch.chdir(tmp_path)
    code, out, err = command_line(*arguments)
    assert (code, out) == (2, "")
    assert err
    assert "Traceback" not in err


def test_a_wrong_list_in_the_environment_is_a_configuration_fault(
    command_line, monkeypatch
) -> None:
    monkeypatch.setenv("CORE_PLUGIN_ALLOW", "a b")
    for command in (("list",), ("doctor",), ("info", "adamw")):
        code, _, err = command_line(*command)
        assert code == 2
        assert err.startswith("error: CORE_PLUGIN_ALLOW: 'a b' is not a distribution's name")


def test_debug_shows_the_traceback_and_the_plugins_own(environment, run_file) -> None:
    environment.site().add("bad", optimizer="bad = bad_opt:x", modules={"bad_opt.py": "1 / 0"})
    file = run_file(optimizer="bad")
    quiet = environment.run("-m", "core_plugin", "validate", str(file))
    debug = environment.run("-m", "core_plugin", "--debug", "validate", str(file))
    assert quiet.returncode == 2
    assert "Traceback" not in quiet.stderr
    assert debug.returncode != 0
    assert "bad_opt.py" in debug.stderr
    assert "ConfigError" in debug.stderr


FAULTY = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Params:
    lr: float = 1.0

    def faults(self, run):
        return [1 / (self.lr - 1.0)]

def optimizer(model, params: Params):
    pass
"""


def test_a_bug_in_a_plugin_is_told_with_the_plugin_and_the_place(environment, run_file) -> None:
    site = environment.site()
    site.add("acme", optimizer="acme = acme_opt:optimizer", modules={"acme_opt.py": FAULTY})
    file = str(run_file(optimizer="acme"))
    quiet = environment.run("-m", "core_plugin", "validate", file)
    debug = environment.run("-m", "core_plugin", "--debug", "validate", file)
    assert (quiet.returncode, debug.returncode) == (1, 1)
    assert quiet.stderr == (
        f"error: {site.path}/acme_opt.py:9: optimizer 'acme' of acme 1.0: "
        "ZeroDivisionError: float division by zero\nrun with --debug for the traceback\n"
    )
    assert "Traceback" in debug.stderr
    assert "return [1 / (self.lr - 1.0)]" in debug.stderr


def test_a_list_that_names_nothing_is_a_warning_of_one_line(environment, run_file) -> None:
    done = environment.run(
        "-m", "core_plugin", "validate", str(run_file()), CORE_PLUGIN_DENY="no-such-dist"
    )
    assert done.returncode == 0
    assert done.stderr.startswith("warning: CORE_PLUGIN_DENY has 'no-such-dist', which is none of")
    assert done.stderr.count("\n") == 1


def test_no_command_imports_torch(environment, run_file) -> None:
    file = run_file(hooks=["progress", "jsonl"])
    code = (
        "import sys\nfrom core_plugin.cli import main\n"
        f"for arguments in (['list'], ['doctor', '--load'], ['info', 'adamw'], ['schema'],\n"
        f"                  ['validate', {str(file)!r}], ['train', '--help']):\n"
        "    sys.argv = ['core-plugin', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code or arguments[0] == 'doctor', end\n"
        "assert 'core_plugin.builtin.optimizer' in sys.modules\n"
        "print('torch' in sys.modules)\n"
    )
    assert environment.output(code).splitlines()[-1] == "False"


def test_help_documents_every_command_argument_and_option(command_line, monkeypatch) -> None:
    import typer

    from core_plugin import cli

    monkeypatch.setenv("COLUMNS", "200")
    command = typer.main.get_command(cli.app)
    _, out, _ = command_line("--help")
    assert "--version" in out
    assert "--debug" in out
    for name, one in command.commands.items():
        assert name in out
        assert one.help
        _, page, _ = command_line(name, "--help")
        for parameter in one.params:
            assert getattr(parameter, "help", None), (name, parameter.name)
            assert parameter.opts[0] in page or parameter.human_readable_name in page


def test_the_version_is_printed(command_line) -> None:
    assert command_line("--version") == (0, f"core-plugin {__version__}\n", "")


def test_a_reader_that_stops_early_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "core_plugin", "list"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    assert "Traceback" not in done.stderr

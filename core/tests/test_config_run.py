"""A run's YAML: what is read, what is resolved, and what is said about every fault."""

import json
import pickle
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_plugin import config, document
from core_plugin.config import RunConfig
from core_plugin.errors import ConfigError, PluginDisabledError
from core_plugin.types import HookPlugin, OptimizerPlugin

pytestmark = pytest.mark.torchfree

RUN = """\
data: {name: text, path: corpus.txt}
hooks: []
train: {steps: 10}
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        file = tmp_path / "run.yaml"
        file.write_text(textwrap.dedent(text), encoding="utf-8")
        return file

    return write


@pytest.fixture
def load(write):
    return lambda text, *overrides: config.load(write(text), overrides)


@pytest.fixture
def faults(load, tmp_path):
    """The faults of a YAML; the file's own path is cut off."""

    def faults(text: str, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as raised:
            load(text, *overrides)
        return [fault.replace(f"{tmp_path}/", "") for fault in raised.value.faults]

    return faults


def test_a_short_file_is_a_whole_run(load) -> None:
    run = load(RUN)
    assert isinstance(run, RunConfig)
    assert run["optimizer"].route == OptimizerPlugin("adamw")
    assert run.params("data").path == "corpus.txt"
    assert run.get("peft") is None
    assert run.params("peft") is None
    with pytest.raises(KeyError, match="peft"):
        run["peft"]
    assert run.train.steps == 10


def test_a_name_is_short_for_a_mapping_with_it(load) -> None:
    short = load(RUN + "optimizer: sgd\nscheduler: cosine\n")
    long = load(RUN + "optimizer: {name: sgd}\nscheduler:\n  name: cosine\n")
    assert short.resolved() == long.resolved()
    assert short.digest() == long.digest()


def test_values_have_the_types_of_yaml_1_2(load) -> None:
    run = load(
        """\
        data: {name: text, path: no}
        hooks: []
        optimizer: {name: adamw, lr: 1e-4, weight_decay: 1}
        train: {steps: 10, max_grad_norm: ~}
        checkpoint: {directory: 2024-01-31 10:00:00, resume: "1e-4"}
        """
    )
    assert run.params("data").path == "no"
    assert run.params("optimizer").lr == 1e-4
    assert run.train.max_grad_norm is None
    assert run.checkpoint.directory == "2024-01-31 10:00:00"
    assert run.checkpoint.resume == "1e-4"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "train:\n  steps: 1\n  steps: 2\n",
            'run.yaml:3: is not YAML: found duplicate key "steps"',
        ),
        ("train: {steps: 1\ndata: x\n", "run.yaml:2: is not YAML: "),
        ("train:\n\tsteps: 1\n", "run.yaml:2: is not YAML: found character"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2: is not YAML: but found another document"),
        ("train: !python/object x\n", "run.yaml:1: is not YAML: could not determine a constructor"),
        ("train: !!int abc\n", "run.yaml: is not YAML: invalid literal for int"),
        ("train: \x01\n", "run.yaml: is not YAML: unacceptable character"),
        ("train: &x [*x]\n", "run.yaml: is nested too deeply, or an anchor contains itself"),
        ("- train\n", "run.yaml:1: must hold a mapping"),
        ("", "run.yaml:1: must hold a mapping"),
        ("train\n", "run.yaml:1: must hold a mapping"),
    ],
)
def test_what_is_no_yaml_mapping_is_told_with_its_line(faults, text, fault) -> None:
    (told,) = faults(text)
    assert told.startswith(fault)


def test_a_file_that_cannot_be_read_is_told(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        config.load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        config.load(str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"train:\n  # caf\xe9\n  steps: 1\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml:2: is not UTF-8 text"):
        config.load(tmp_path / "latin.yaml")


def test_faults_of_all_slots_and_sections_are_told_at_once(faults) -> None:
    told = faults(
        """\
        optimzer: sgd
        data: {name: text, path: corpus.txt, sequence_lenght: 3}
        optimizer:
          name: adamw
          lr: high
          betas: [0.9]
        scheduler: cosin
        hooks:
          - {name: jsonl, every: 2}
          - 7
        kernels: fast
        model: 3
        distributed: {layers: 3}
        launcher: ~
        train: {step: 10}
        checkpoint: []
        """,
        "device.naem=cpu",
        "train.seed=x",
        "no-equals-sign",
    )
    assert [fault for fault in told if fault.startswith("override 'no")] == [
        "override 'no-equals-sign': write key=value, such as optimizer.lr=1e-3"
    ]
    places = {fault.split(": ")[1]: fault.split(": ")[0] for fault in told if "no-eq" not in fault}
    assert places == {
        "optimzer": "run.yaml:1",
        "data.sequence_lenght": "run.yaml:2",
        "optimizer.lr": "run.yaml:5",
        "optimizer.betas.1": "run.yaml:6",
        "scheduler.name": "run.yaml:7",
        "hooks.0.every": "run.yaml:9",
        "hooks.1": "run.yaml:10",
        "kernels": "run.yaml:11",
        "model": "run.yaml:12",
        "distributed.name": "run.yaml:13",
        "launcher": "run.yaml:14",
        "train.step": "run.yaml:15",
        "train.steps": "run.yaml:15",
        "train.seed": "override 'train.seed=x'",
        "checkpoint": "run.yaml:16",
        "device.naem": "override 'device.naem=cpu'",
    }
    messages = {fault.split(": ")[1]: fault for fault in told}
    assert "did you mean optimizer?" in messages["optimzer"]
    assert "did you mean sequence_length?" in messages["data.sequence_lenght"]
    assert "did you mean cosine" in messages["scheduler.name"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("nonsense: 1", "run.yaml:4: nonsense: is not a known key; known are model, data, "),
        ("3: 1", "run.yaml:4: 3: is not a known key"),
        ("optimizer: {name: 3}", "run.yaml:4: optimizer.name: must be a plugin's name, got 3"),
        ("optimizer: {lr: 3}", "run.yaml:4: optimizer.name: must be a plugin's name, got None"),
        ("optimizer: ' '", "run.yaml:4: optimizer.name: must be a plugin's name, got ' '"),
        ("optimizer: ~", "run.yaml:4: optimizer: names no plugin; the default is adamw"),
        (
            "optimizer: [sgd]",
            "run.yaml:4: optimizer: must be a plugin's name or a mapping with one",
        ),
        ("kernels: ~", "run.yaml:4: kernels: names no plugin; write [] for none"),
        ("checkpoint: {every: 0}", "run.yaml:4: checkpoint: every must be at least 1"),
        (
            "launcher: {name: torchrun, processes_per_host: 2}",
            "run.yaml:4: launcher: 2 processes, but the strategy 'none' is for one",
        ),
    ],
)
def test_a_fault_is_told_with_its_line(faults, text, fault) -> None:
    (told,) = faults(RUN + text)
    assert told.startswith(fault)


def test_what_is_missing_is_told_at_what_it_would_be_in(faults) -> None:
    assert faults("data: {name: text, path: x}\nhooks: []\n") == [
        "run.yaml:1: train.steps: is missing"
    ]


def test_parameters_may_object_to_the_rest_of_the_run(load, faults) -> None:
    (told,) = faults(RUN + "scheduler: {name: cosine, warmup_steps: 11}\n")
    assert told.startswith("run.yaml:4: scheduler: ")
    assert load(RUN + "scheduler: {name: cosine, warmup_steps: 9}\n")


def test_a_plugin_that_does_not_load_is_a_fault_with_its_cause(environment, write) -> None:
    modules = {"does_not_load.py": "raise RuntimeError('no device')"}
    environment.site().add("acme", optimizer="broken = does_not_load:x", modules=modules)
    with pytest.raises(ConfigError, match="RuntimeError: no device") as raised:
        config.load(write(RUN + "optimizer: broken\nscheduler: cosin\n"))
    assert len(raised.value.faults) == 2
    (cause,) = raised.value.__cause__.exceptions
    assert isinstance(cause, RuntimeError)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("train.steps=20", ("train", "steps"), 20),
        ("optimizer.lr=1e-3", ("optimizer", "lr"), 1e-3),
        ("optimizer=sgd", ("optimizer", "name"), "sgd"),
        ("optimizer={name: sgd, lr: 2}", ("optimizer", "lr"), 2.0),
        ("scheduler.name=cosine", ("scheduler", "name"), "cosine"),
        ("optimizer.betas.0=0.5", ("optimizer", "betas"), [0.5, 0.999]),
        ("checkpoint.every=", ("checkpoint", "every"), None),
        ("checkpoint.directory=2024-99-99", ("checkpoint", "directory"), "2024-99-99"),
        ("checkpoint.directory='7'", ("checkpoint", "directory"), "7"),
        (" hooks.0 = jsonl", ("hooks", 0, "name"), "jsonl"),
        ("hooks.1.min_seconds=2", ("hooks", 1, "min_seconds"), 2.0),
        ("hooks=[jsonl]", ("hooks", 0, "name"), "jsonl"),
    ],
)
def test_overrides_go_before_the_file(load, override, path, value) -> None:
    text = """\
        data: {name: text, path: corpus.txt}
        optimizer: {name: adamw, betas: [0.9, 0.999]}
        scheduler: constant
        hooks: [progress, progress]
        train: {steps: 10}
        checkpoint: {every: 3}
        """
    found = load(text, override).resolved()
    for part in path:
        found = found[part]
    assert found == value


def test_an_override_reaches_into_the_default_plugins(load) -> None:
    run = load(
        "data: {name: text, path: x}\ntrain: {steps: 1}\n", "optimizer.lr=3", "hooks.0=jsonl"
    )
    assert run["optimizer"].route.name == "adamw"
    assert run.params("optimizer").lr == 3.0
    assert [s.route.name for s in run.selections["hooks"]] == ["jsonl", "jsonl"]
    again = load("data: {name: text, path: x}\ntrain: {steps: 1}\n")
    assert [s.route.name for s in again.selections["hooks"]] == ["progress", "jsonl"]


def test_an_override_changes_one_of_two_that_share_an_anchor(load) -> None:
    text = "data: {name: text, path: x}\nhooks: [&h {name: progress}, *h]\ntrain: {steps: 1}\n"
    run = load(text, "hooks.1.min_seconds=5")
    assert [s.params.min_seconds == 5 for s in run.selections["hooks"]] == [False, True]


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("train.steps", "write key=value"),
        ("=3", "write key=value"),
        ("train..steps=3", "write key=value"),
        ("train.steps=[1", "the value is not YAML"),
        ("train.steps=!!int x", "the value is not YAML: invalid literal"),
        ("train.steps.x=1", "steps is 10, which has no parts"),
        ("hooks.0=jsonl", "'0' is no index of a list of 0"),
        ("hooks.²=jsonl", "'²' is no index of a list of 0"),
        ("hooks.-1=jsonl", "'-1' is no index of a list of 0"),
        ("trian.steps=1", "trian: is not a known key; did you mean train?"),
        ("optimizer.lr=high", "optimizer.lr: must be a valid number, got 'high'"),
        ("peft.r=8", "peft.name: must be a plugin's name, got None"),
    ],
)
def test_an_override_that_cannot_be_is_told(faults, override, fault) -> None:
    (told,) = faults(RUN, override)
    assert told.startswith(f"override {override!r}: {fault}")


def test_what_is_resolved_can_be_read_again(load, tmp_path) -> None:
    run = load(RUN + "optimizer: {name: core-plugin:sgd, lr: 1e-5}\n", "hooks=[jsonl, progress]")
    config.dump(run.resolved(), tmp_path / "resolved.yaml")
    again = config.load(tmp_path / "resolved.yaml")
    assert again.resolved() == run.resolved()
    assert again.digest() == run.digest()
    assert json.loads(json.dumps(run.resolved())) == run.resolved()
    assert again["optimizer"].route.name == "core-plugin:sgd"
    assert load(RUN, "train.seed=1").digest() != load(RUN).digest()


@dataclass(frozen=True)
class TaggedParams:
    tags: frozenset[str] = frozenset()


def tagged(params: TaggedParams, run): ...


def test_the_digest_does_not_depend_on_the_hash_seed(environment) -> None:
    code = (
        "from dataclasses import dataclass, field\n"
        "@dataclass(frozen=True)\nclass Params:\n"
        "    tags: frozenset[str] = frozenset('abcdefgh')\n    more: set[int] | None = None\n"
        "    derived: int = field(init=False, default=1)\n"
        "def hook(params: Params, run): ...\n"
    )
    environment.site().add(
        "acme", hook="tagged = tagged_hook:hook", modules={"tagged_hook.py": code}
    )
    (environment.root / "run.yaml").write_text(RUN.replace("[]", "[tagged]"))
    script = (
        "from core_plugin import config; run = config.load('run.yaml'); print(run.digest());"
        "assert config.resolve(run.resolved()).digest() == run.digest()"
    )
    first, second = (environment.output(script, PYTHONHASHSEED=seed) for seed in "12")
    assert first == second


def test_a_run_and_the_document_that_it_was_given_do_not_change_each_other() -> None:
    HookPlugin("tagged").register(override=True)(tagged)
    given_document = {
        "data": {"name": "text", "path": "x"},
        "hooks": [{"name": "tagged", "tags": ["b", "a"]}],
        "train": {"steps": 1},
    }
    before = json.dumps(given_document)
    run = config.resolve(given_document)
    assert json.dumps(given_document) == before
    given_document["hooks"][0]["tags"].append("c")
    assert run.document == json.loads(before)
    assert run.resolved()["hooks"] == [{"name": "tagged", "tags": ["a", "b"]}]


def test_another_process_that_gets_a_run_keeps_its_lists(environment) -> None:
    module = {"kept_out.py": "def optimizer(model, params): ..."}
    environment.site().add("acme", optimizer="kept_out = kept_out:optimizer", modules=module)
    document = {"data": {"name": "text", "path": "x"}, "hooks": [], "train": {"steps": 1}}
    pickled = pickle.dumps(config.resolve(document | {"plugins": {"deny": ["acme"]}}))
    config.resolve(document)
    assert OptimizerPlugin("kept_out").resolve()
    run = pickle.loads(pickled)
    assert run["optimizer"].route == OptimizerPlugin("adamw")
    with pytest.raises(PluginDisabledError):
        OptimizerPlugin("kept_out").resolve()


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(
        st.characters(
            codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="\u2028\u2029\ufeff"
        )
    )
)
documents = st.dictionaries(
    st.from_regex(r"[a-z]{1,5}", fullmatch=True),
    st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.just("k"), inner)),
)


@settings(deadline=None, max_examples=50)
@given(documents)
def test_what_is_written_is_read_as_the_same(tmp_path_factory, values) -> None:
    file = tmp_path_factory.mktemp("yaml") / "x.yaml"
    document.write(values, file)
    read, places = document.read(file)
    assert read == values
    assert set(places) >= {(), *((key,) for key in values)}

"""Parameters: from a configuration to a dataclass, with every fault at its place."""

import copy
import enum
import math
from collections import UserDict
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_plugin.config import plain_data
from core_plugin.errors import ConfigError, PluginContractError
from core_plugin.params import Origin, json_schema, near
from core_plugin.plugin import BasePlugin

pytestmark = pytest.mark.torchfree


class SamplerPlugin(BasePlugin): ...


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = "exact"


@dataclass(frozen=True)
class Inner:
    depth: int
    ratio: float = 0.5


@dataclass(frozen=True)
class Params:
    size: int
    rate: float = 0.1
    label: str = "x"
    kind: Literal["a", "b"] = "a"
    on: bool = False
    limit: Optional[int] = None  # noqa: UP045
    path: Path = Path()
    mode: Mode = Mode.FAST
    names: list[str] = field(default_factory=list)
    pair: tuple[float, float] = (0.0, 1.0)
    inner: Inner = Inner(1)
    inners: list[Inner] = field(default_factory=list)
    table: dict[str, Inner] = field(default_factory=dict)
    target: str | list[str] = "all"
    tags: frozenset[str] = frozenset()
    computed: int = field(init=False, default=3)

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size must not be negative, got {self.size}")


def parse(config: Any, params_type: Any = Params, **places: str) -> Any:
    origin = Origin("sampler", {tuple(k.split("__")): v for k, v in places.items()})
    return SamplerPlugin.parse_params(config, params_type, origin=origin)


def faults(config: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse(config)
    return list(raised.value.faults)


def test_an_instance_is_returned_as_it_is() -> None:
    params = Params(size=1)
    assert parse(params) is params


def test_none_and_an_empty_mapping_are_the_defaults() -> None:
    @dataclass
    class Defaults:
        a: int = 1

    assert parse(None, Defaults) == parse({}, Defaults) == Defaults()
    assert faults(None) == faults({}) == ["sampler.size: is missing"]


def test_every_kind_of_field_is_built() -> None:
    config = {
        "size": 3,
        "rate": 1,
        "label": "1e-4",
        "kind": "b",
        "on": True,
        "limit": 5,
        "path": "a/b",
        "mode": "exact",
        "names": ["p", "q"],
        "pair": [1, 2.5],
        "inner": {"depth": 2},
        "inners": [{"depth": 3, "ratio": 1}],
        "table": {"k": {"depth": 4}},
        "target": ["x"],
        "tags": ["z", "y"],
    }
    before = copy.deepcopy(config)
    params = parse(config)
    assert params == Params(
        3,
        1.0,
        "1e-4",
        "b",
        True,
        5,
        Path("a/b"),
        Mode.EXACT,
        ["p", "q"],
        (1.0, 2.5),
        Inner(2),
        [Inner(3, 1.0)],
        {"k": Inner(4)},
        ["x"],
        frozenset("yz"),
    )
    assert type(params.rate) is float
    assert config == before


def test_the_configuration_may_hold_python_values_and_is_not_changed() -> None:
    config = MappingProxyType(
        {"size": 1, "path": Path("p"), "mode": Mode.EXACT, "inner": Inner(9), "pair": (0.0, 2.0)}
        | {"table": UserDict(k=Inner(1)), "names": ["a"]}
    )
    params = parse(config)
    assert params.inner == Inner(9)
    assert params.table == {"k": Inner(1)}
    assert params.pair == (0.0, 2.0)
    params.names.append("b")
    assert config["names"] == ["a"]


@pytest.mark.parametrize("config", [[], "size=1", 3, [("size", 1)], Inner(1)])
def test_something_else_is_a_type_error(config) -> None:
    with pytest.raises(TypeError, match=r"sampler: the parameters must be a mapping, a Params or"):
        parse(config)


@pytest.mark.parametrize("params_type", [dict, int, None, "Params", Inner(1)])
def test_a_params_type_that_is_no_dataclass_is_a_type_error(params_type) -> None:
    with pytest.raises(TypeError, match="sampler: params must be a dataclass type, got"):
        parse({}, params_type)


@pytest.mark.parametrize("value", [object(), b"\xff", "\ud800"])
def test_a_value_that_no_configuration_can_hold_is_a_fault(value) -> None:
    (told,) = faults({"size": value})
    assert told.startswith("sampler: holds what no configuration can: ")


def test_a_field_that_cannot_be_checked_is_the_plugins_fault() -> None:
    @dataclass
    class Odd:
        thing: "NotImported"  # noqa: F821

    with pytest.raises(PluginContractError, match=r"Odd has a field whose type cannot be checked"):
        parse({}, Odd)


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"size": "3"}, "size: must be a valid integer, got '3'"),
        ({"size": 3.0}, "size: must be a valid integer, got 3.0"),
        ({"size": True}, "size: must be a valid integer, got True"),
        ({"size": None}, "size: must be a valid integer, got None"),
        ({"rate": "0.1"}, "rate: must be a valid number, got '0.1'"),
        ({"label": 3}, "label: must be a valid string, got 3"),
        ({"on": 1}, "on: must be a valid boolean, got 1"),
        ({"on": "no"}, "on: must be a valid boolean, got 'no'"),
        ({"kind": "c"}, "kind: must be 'a' or 'b', got 'c'"),
        ({"mode": "slow"}, "mode: must be 'fast' or 'exact', got 'slow'"),
        ({"limit": "5"}, "limit: must be a valid integer, got '5'"),
        ({"names": "p"}, "names: must be a list, got 'p'"),
        ({"names": ["p", 2]}, "names.1: must be a valid string, got 2"),
        ({"pair": [1]}, "pair.1: is missing"),
        ({"inner": {"depth": "x"}}, "inner.depth: must be a valid integer, got 'x'"),
        ({"inner": {}}, "inner.depth: is missing"),
        ({"inner": 3}, "inner: must be a mapping, got 3"),
        (
            {"inner": {"depth": 1, "dpeth": 2}},
            "inner.dpeth: is not a known parameter; did you mean depth?",
        ),
        ({"inners": [{"depth": 1}, {"depth": "x"}]}, "inners.1.depth: must be a valid integer, "),
        ({"table": {"k": {"deep": 1, "depth": 1}}}, "table.k.deep: is not a known parameter; did "),
        (
            {"target": 5},
            "target: must be a valid string or must be a list, got 5",
        ),
        ({"siez": 2}, "siez: is not a known parameter; did you mean size?"),
        (
            {"zzz": 2},
            "zzz: is not a known parameter; known are inner, inners, kind, label, limit, ",
        ),
        ({"computed": 2}, "computed: is not a known parameter; "),
        ({1: 2}, "1: is not a known parameter; known are "),
        ({"size": -1}, "size must not be negative, got -1"),
    ],
)
def test_a_fault_is_told_with_its_path_and_value(config, fault) -> None:
    (told,) = faults({"size": 1} | config)
    assert told.removeprefix("sampler").lstrip(".: ").startswith(fault)
    if "known" in fault:
        assert "computed" not in told.partition(";")[2]


def test_all_faults_are_told_at_once_each_at_its_line() -> None:
    config = {"siez": 1, "rate": "x", "kind": "q", "inner": {"ratio": "y"}}
    with pytest.raises(ConfigError) as raised:
        parse(
            config,
            siez="run.yaml:2",
            rate="run.yaml:3",
            inner="run.yaml:5",
            inner__ratio="run.yaml:7",
        )
    assert sorted(raised.value.faults) == [
        "run.yaml:2: sampler.siez: is not a known parameter; did you mean size?",
        "run.yaml:3: sampler.rate: must be a valid number, got 'x'",
        "run.yaml:5: sampler.inner.depth: is missing",
        "run.yaml:7: sampler.inner.ratio: must be a valid number, got 'y'",
        "sampler.kind: must be 'a' or 'b', got 'q'",
        "sampler.size: is missing",
    ]
    assert str(raised.value) == "\n".join(raised.value.faults)


def test_an_origin_finds_the_nearest_place() -> None:
    origin = Origin(places={(): "f:1", ("a",): "f:2", ("a", 0, "b"): "f:4"})
    assert origin.fault("wrong") == "f:1: wrong"
    assert origin.fault("wrong", ("a", 0)) == "f:2: a.0: wrong"
    assert origin.below("a").below(0).fault("wrong", ("b", "c")) == "f:4: a.0.b.c: wrong"
    assert origin.below("z").fault("wrong") == "f:1: z: wrong"
    assert Origin().fault("wrong") == "wrong"


def test_names_that_are_near_are_told_and_others_are_not() -> None:
    assert near("fsdp", ["fsdp2", "ddp", "none"]) == "fsdp2"
    assert near("zzz", ["fsdp2", "ddp"]) == ""


def test_the_json_schema_refuses_unknown_fields_at_every_depth() -> None:
    schema = json_schema(Params)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Inner"]["additionalProperties"] is False
    assert schema["required"] == ["size"]
    assert schema["properties"]["kind"]["enum"] == ["a", "b"]


numbers = st.floats(allow_nan=False)
inner = st.builds(Inner, st.integers(), numbers)
instances = st.builds(
    Params,
    size=st.integers(0),
    rate=numbers,
    label=st.text(),
    kind=st.sampled_from(["a", "b"]),
    on=st.booleans(),
    limit=st.none() | st.integers(),
    path=st.sampled_from([Path("a/b"), Path("/c")]),
    mode=st.sampled_from(Mode),
    names=st.lists(st.text()),
    pair=st.tuples(numbers, numbers),
    inner=inner,
    inners=st.lists(inner, max_size=2),
    table=st.dictionaries(st.text(), inner, max_size=2),
    target=st.text() | st.lists(st.text()),
    tags=st.frozensets(st.text(), max_size=3),
)


@settings(deadline=None)
@given(instances)
def test_plain_data_is_parsed_to_the_same_params(params: Params) -> None:
    document = plain_data(params)
    assert parse(document) == params
    assert plain_data(parse(document)) == document


def test_plain_data_of_a_set_is_sorted_and_what_is_no_number_stays_so() -> None:
    assert plain_data({"a": {"z", "b", "y"}}) == {"a": ["b", "y", "z"]}
    assert math.isinf(plain_data(math.inf))
    assert plain_data(Mode.EXACT) == "exact"


WRONG: dict[str, Any] = {
    "size": "1",
    "rate": [],
    "label": 1,
    "kind": "c",
    "on": "yes",
    "limit": "x",
    "mode": 3,
    "names": "p",
    "inner": {"ratio": 1},
    "unknown": 1,
    "another": None,
}
RIGHT = {"size": 1}


@settings(deadline=None)
@given(st.sets(st.sampled_from(sorted(WRONG))))
def test_the_faults_of_a_configuration_are_those_of_its_parts_together(keys: set[str]) -> None:
    def told(config: dict[str, Any]) -> set[str]:
        try:
            parse(config)
        except ConfigError as error:
            return set(error.faults)
        return set()

    alone = [told(RIGHT | {key: WRONG[key]}) for key in keys]
    assert all(len(one) == 1 for one in alone)
    assert told(RIGHT | {key: WRONG[key] for key in keys}) == set().union(*alone)

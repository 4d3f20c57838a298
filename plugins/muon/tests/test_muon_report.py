"""The table of what is done with each parameter, and what a step costs."""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from core_plugin_muon import Muon, format_report
from core_plugin_muon.coefficients import schedule
from core_plugin_muon.newton_schulz import flops, working_dtype
from core_plugin_muon.options import Rule

KEYS = [
    *("parameter", "shape", "optimizer", "reason", "scale"),
    *("lr", "decay", "owner", "dtype", "GFLOP"),
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)


class Model(nn.Module):
    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(100, width)
        self.image = nn.Conv2d(3, width, 4, bias=False)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, 100, bias=False)


def on_meta(**sizes: int) -> nn.Module:
    with torch.device("meta"):
        return Model(**sizes)


def cost(rows: int, columns: int) -> float:
    return flops((rows, columns), schedule("keller_jordan", 5), torch.float32) / 1e9


def by_name(optimizer: Muon, world_size: int | None = None) -> dict[str, dict[str, object]]:
    return {row["parameter"]: row for row in optimizer.describe_parameters(world_size)}


def test_a_row_for_each_parameter_in_the_order_of_the_model() -> None:
    model = on_meta()
    rows = Muon.for_model(model).describe_parameters()
    assert [row["parameter"] for row in rows] == [name for name, _ in model.named_parameters()]
    assert [row["shape"] for row in rows] == [tuple(p.shape) for p in model.parameters()]
    assert all(list(row) == KEYS for row in rows)


def test_what_a_row_says() -> None:
    rules = [
        Rule("qkv", "muon", split=(64, 64, 64)),
        Rule("out", "muon", split=(16, 48)),
        Rule("1.up", "skip"),
    ]
    options = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "original"}
    optimizer = Muon.for_model(on_meta(), rules, adamw_lr=0.001, adamw_weight_decay=0.0, **options)
    found = by_name(optimizer)
    of_muon = {"optimizer": "muon", "lr": 0.02, "decay": 0.1, "owner": "0", "dtype": "auto"}
    assert found["blocks.0.up.weight"] == {
        "parameter": "blocks.0.up.weight",
        "shape": (256, 64),
        "reason": "hidden matrix",
        "scale": 2.0,
        "GFLOP": cost(256, 64),
        **of_muon,
    }
    assert found["table.weight"] == {
        "parameter": "table.weight",
        "shape": (100, 64),
        "optimizer": "adamw",
        "reason": "embedding",
        "scale": None,
        "lr": 0.001,
        "decay": 0.0,
        "owner": None,
        "dtype": None,
        "GFLOP": None,
    }
    skipped = found["blocks.1.up.weight"]
    assert (skipped["optimizer"], skipped["lr"], skipped["decay"]) == ("skip", None, None)


def test_the_scale_and_the_cost_are_those_of_the_matrices() -> None:
    """Not of the parameter's own dimensions: a kernel's are no rows and columns."""
    rules = [Rule("qkv", "muon", split=(64, 64, 64)), Rule("out", "muon", split=(16, 48))]
    found = by_name(Muon.for_model(on_meta(), rules, adjust_lr_fn="spectral"))
    assert found["image.weight"]["scale"] == pytest.approx(math.sqrt(64 / 48))
    assert found["image.weight"]["GFLOP"] == cost(64, 48)
    assert found["blocks.0.qkv.weight"]["scale"] == 1.0
    assert found["blocks.0.qkv.weight"]["GFLOP"] == pytest.approx(3 * cost(64, 64))
    assert found["blocks.0.out.weight"]["scale"] == "0.5 to 0.866"
    assert found["blocks.0.out.weight"]["GFLOP"] == pytest.approx(cost(16, 64) + cost(48, 64))


def test_owners_share_the_work_without_processes() -> None:
    optimizer = Muon.for_model(on_meta(), [Rule("qkv", "muon", split=(64, 64, 64))])
    loads = dict.fromkeys(range(4), 0.0)
    spread = set()
    for row in optimizer.describe_parameters(world_size=4):
        if row["optimizer"] == "muon" and "qkv" not in row["parameter"]:
            loads[int(row["owner"])] += row["GFLOP"]
        elif row["optimizer"] == "muon":
            spread.add(row["owner"])
    assert all(loads.values())
    assert any("-" in owner or "," in owner for owner in spread)


def test_owners_are_those_of_the_plan() -> None:
    """Longest processing time first: 12 equal matrices on 5 ranks."""
    model = nn.ModuleList([nn.Linear(32, 32, bias=False, device="meta") for _ in range(12)])
    owners = [row["owner"] for row in Muon.for_model(model).describe_parameters(world_size=5)]
    assert owners == ["0", "1", "2", "3", "4", "0", "1", "2", "3", "4", "0", "1"]


def test_groups_of_the_users_own_have_rows_too() -> None:
    matrix, vector, odd = (nn.Parameter(torch.zeros(n)) for n in ((4, 8), (4,), (3, 5, 7)))
    optimizer = Muon(
        [
            {"params": [("matrix", matrix)], "algorithm": "muon", "lr": torch.tensor(0.5)},
            {"params": [("vector", vector)], "algorithm": "adamw"},
        ]
    )
    rows = optimizer.describe_parameters(world_size=2)
    assert [row["parameter"] for row in rows] == ["matrix", "vector"]
    assert rows[0]["lr"] == 0.5
    assert rows[0]["reason"] == "its group says so"
    unnamed = Muon([{"params": [odd], "algorithm": "muon", "flatten": False}])
    assert unnamed.describe_parameters()[0]["parameter"] == "0 of group 0"
    assert unnamed.describe_parameters(2)[0]["owner"] == "0-1"


def test_the_schedule_of_learning_rates_is_seen() -> None:
    optimizer = Muon.for_model(on_meta(), lr=0.5)
    for group in optimizer.param_groups:
        group["lr"] = 0.25
    assert {row["lr"] for row in optimizer.describe_parameters()} == {0.25}


def test_the_text_has_the_rows_and_what_a_step_takes() -> None:
    lines = format_report(Muon.for_model(on_meta()), world_size=2).splitlines()
    assert lines[0].split() == KEYS
    assert lines[1].split() == ["table.weight", "100x64", "adamw", "embedding", "0.003", "0.1"]
    assert lines[2].split()[:5] == ["image.weight", "64x3x4x4", "muon", "convolution", "1.6"]
    matrices = 64 * 48 + 3 * 64 * 64 * (3 + 1 + 4 + 4)
    total = cost(64, 48) + 3 * (cost(192, 64) + cost(64, 64) + 2 * cost(256, 64))
    assert lines[-4] == f"muon: 13 tensors, {matrices:,} parameters"
    assert lines[-3] == f"adamw: 5 tensors, {2 * 100 * 64 + 3 * 256:,} parameters"
    assert lines[-2].startswith(f"orthogonalization: {total:.4g} GFLOP a step, in float32 (auto:")
    assert lines[-1].startswith("2 ranks: the busiest computes 1.00 times an equal share, and none")


def test_numbers_stand_on_the_right() -> None:
    lines = format_report(Muon.for_model(on_meta(width=8))).splitlines()
    ends = {len(line) for line in lines[:-3] if " muon " in line}
    assert ends == {len(lines[0])}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_is_sent_follows_from_the_sizes(ranks: int) -> None:
    """Of each element that is not there already, to the owner and back: 2 / W * (W - 1) / W."""
    width, count = 64, 16
    model = nn.ModuleList(
        [nn.Linear(width, width, bias=False, device="meta") for _ in range(count)]
    )
    last = format_report(Muon.for_model(model), world_size=ranks).splitlines()[-1]
    sent = 4 * 2 * (count * width**2 / ranks) * (ranks - 1) / ranks
    assert last == (
        f"{ranks} ranks: the busiest computes 1.00 times an equal share, and none sends more than "
        f"{sent / 1e6:.4g} MB a step"
    )


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """This process is the first of four, and nothing is exchanged."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
def test_ranks_that_hold_all_send_their_share_to_each_other_one() -> None:
    matrices = [nn.Linear(64, 64, bias=False, device="meta") for _ in range(6)]
    optimizer = Muon.for_model(nn.ModuleList(matrices), process_group=dist.group.WORLD)
    last = format_report(optimizer).splitlines()[-1]
    assert "the busiest computes 1.33 times" in last  # 2 of 6 matrices, not 1.5
    assert last.endswith(f"none sends more than {4 * 3 * 2 * 64**2 / 1e6:.4g} MB a step")


@pytest.mark.usefixtures("four_ranks")
def test_what_lies_in_columns_is_computed_by_each_rank() -> None:
    part = torch.zeros(32, 8, device="meta")
    mesh = DeviceMesh("cpu", list(range(4)))
    matrix = nn.Parameter(DTensor.from_local(part, mesh, [Shard(1)], run_check=False))
    optimizer = Muon([("matrix", matrix)])
    row = optimizer.describe_parameters()[0]
    assert (row["shape"], row["owner"], row["GFLOP"]) == ((32, 32), "each", cost(32, 32))
    text = format_report(optimizer)
    assert text.endswith("each rank orthogonalizes 1 tensors whole, not lying there in rows")


def test_an_empty_matrix_costs_and_sends_nothing() -> None:
    matrices = [nn.Parameter(torch.zeros(rows, 8)) for rows in (0, 8)]
    optimizer = Muon(matrices, ns_dtype="float32")
    rows = optimizer.describe_parameters(world_size=2)
    assert rows[0]["GFLOP"] == 0
    half = 4 * 4 * 8 / 1e6  # bytes of the other one, that go to its owner and back
    assert format_report(optimizer, 2).endswith(f"none sends more than {half:.4g} MB a step")


def test_whole_experts_on_their_ranks_send_nothing() -> None:
    class Experts(nn.Module):
        num_experts = 4

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.zeros(4, 8, 16))

    last = format_report(Muon.for_model(Experts()), world_size=4).splitlines()[-1]
    assert last.endswith("none sends more than 0 MB a step")


def test_the_working_dtype_is_told_resolved() -> None:
    text = format_report(Muon.for_model(Model(width=8), ns_dtype="bfloat16"))
    assert text.splitlines()[-1].endswith("in bfloat16 on cpu")
    found = by_name(Muon.for_model(on_meta(), ns_dtype="bfloat16"))
    assert found["image.weight"]["dtype"] == "bfloat16"


def test_the_dtype_that_a_run_would_choose_is_left_open_on_meta() -> None:
    """It depends on the run's device, which may not be this machine's."""
    assert by_name(Muon.for_model(on_meta()))["image.weight"]["dtype"] == "auto"
    here = by_name(Muon.for_model(Model(width=8)))["image.weight"]["dtype"]
    assert here == str(working_dtype("auto", torch.device("cpu"))).removeprefix("torch.")


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_group_without_parameters_has_no_table(algorithm: str) -> None:
    optimizer = Muon([{"params": [], "algorithm": algorithm}])
    assert format_report(optimizer) == "orthogonalization: 0 GFLOP a step"
    assert format_report(optimizer, 2).startswith("orthogonalization: 0 GFLOP a step")

"""Who the ranks are, and what an environment may not say."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from core_plugin.errors import ConfigError
from core_plugin.training.world import (
    Place,
    fresh_store,
    place_from_environment,
    rendezvous_variables,
)

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "1",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "77",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}


def test_no_launcher_gives_no_place():
    assert place_from_environment({"PATH": "/bin"}) is None
    assert place_from_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None


def test_torchruns_variables():
    assert place_from_environment(TORCHRUN) == Place(3, 1, 4, 2)


def test_slurms_variables():
    place = place_from_environment(SLURM)
    assert place == Place(3, 1, 4, 2)
    meeting = rendezvous_variables(place, SLURM)
    assert meeting == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "20077",
    }
    assert rendezvous_variables(place, {**SLURM, **TORCHRUN}) == {
        name: TORCHRUN[name] for name in meeting
    }


def test_torchruns_variables_count_before_slurms():
    assert place_from_environment({**SLURM, **TORCHRUN, "RANK": "2"}) == Place(2, 1, 4, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "4"}, "contradict"),
        ({"LOCAL_RANK": "2"}, "contradict"),
        ({"RANK": "x"}, "RANK is no number"),
        ({"WORLD_SIZE": None}, "not WORLD_SIZE"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "not MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_contradictions_are_refused(changes, message):
    environment = {k: v for k, v in {**TORCHRUN, **changes}.items() if v is not None}
    with pytest.raises(ConfigError, match=message):
        place_from_environment(environment)


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"])
def test_slurms_variables_must_be_numbers(name):
    with pytest.raises(ConfigError, match=f"{name} is no number: 'x'"):
        place_from_environment({**SLURM, name: "x"})


def test_a_slurm_job_must_have_a_number():
    with pytest.raises(ConfigError, match="SLURM_JOB_ID is no number"):
        rendezvous_variables(Place(3, 1, 4, 2), {**SLURM, "SLURM_JOB_ID": "x"})


def test_ranks_that_are_started_again_do_not_read_what_they_left_in_the_store():
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as threads:
        for attempt in range(3):
            ranks = [1, 0, 2] if attempt else [0, 1, 2]
            futures = {}
            for rank in ranks:
                futures[rank] = threads.submit(fresh_store, store, Place(rank, rank, 3, 3))
                time.sleep(0.05)  # the others may come before the rank that makes a new offer
            stores = [futures[rank].result(10) for rank in range(3)]
            assert not any(own.check(["key"]) for own in stores)
            stores[attempt].set("key", str(attempt))
            assert [own.get("key") for own in stores] == [str(attempt).encode()] * 3

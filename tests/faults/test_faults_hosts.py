"""A run over two hosts, of which one is cut off for a while.

It needs root, for network namespaces: ``nox -s hosts``.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

HARNESS = Path(__file__).parent / "harness"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 30
TIMEOUT = 10
ENDED = TIMEOUT + 45
"""Seconds in which a host that is cut off has ended: the watchdog's, then TCP's, on a busy machine.
"""


@pytest.fixture
def hosts(faulty, monkeypatch):
    monkeypatch.syspath_prepend(HARNESS)
    from two_hosts import Hosts

    hosts = Hosts(faulty.workspace, HARNESS)
    try:
        hosts.build()
        yield hosts
    finally:
        hosts.remove()


def job(faulty):
    document = faulty.job("fsdp2", launcher="local", checkpoint={"every": 5, "keep": 3})
    document["data"] |= {"name": "brittle"}  # it takes some time to read
    document["train"] |= {"steps": STEPS, "hang_timeout": TIMEOUT}
    return document


def losses(faulty, directory="run"):
    return [m["loss"] for m in faulty.workspace.metrics(directory)]


def undisturbed(faulty, hosts):
    document = job(faulty) | {"launcher": {"name": "torchrun", "processes_per_host": 2}}
    path = hosts.environment["PYTHONPATH"]
    faulty.train(document, 2, directory="undisturbed", PYTHONPATH=path)
    return losses(faulty, "undisturbed")


def start(faulty, hosts, *options, max_restarts=0):
    file = faulty.workspace.write(job(faulty), 2, "run")
    return hosts.start(file, *options, max_restarts=max_restarts)


def cut_at(step, faulty, hosts, agents):
    deadline = time.monotonic() + 120
    while len(faulty.workspace.metrics()) < step:
        assert time.monotonic() < deadline, "\n".join(agent.output for agent in agents)
        time.sleep(0.01)
    hosts.cut()


def ended(agents, seconds):
    """The exit code and the output of each, or all that was printed."""
    deadline = time.monotonic() + seconds
    while not all(agent.has_ended for agent in agents):
        assert time.monotonic() < deadline, "\n\n".join(agent.output for agent in agents)
        time.sleep(0.1)
    return [agent.end for agent in agents]


def assert_finished(ends):
    assert [code for code, _ in ends] == [0, 0], "\n\n".join(output for _, output in ends)


def test_a_run_whose_host_is_cut_off_ends_on_both_and_goes_on_when_started_again(faulty, hosts):
    hosts.give_up_soon()
    agents = start(faulty, hosts)
    cut_at(12, faulty, hosts, agents)
    for code, output in ended(agents, ENDED):
        assert code == 1, output
        assert f"no progress for {TIMEOUT} seconds (train.hang_timeout)" in output
        assert output.count("silent") == 1, output
    assert len(losses(faulty)) < STEPS
    hosts.mend()
    newest = faulty.workspace.checkpoints()[-1].name
    agents = start(faulty, hosts, "--resume")
    ends = ended(agents, 120)
    assert_finished(ends)
    assert any(f"going on from run/checkpoints/{newest}" in output for _, output in ends)
    assert losses(faulty) == undisturbed(faulty, hosts)


def test_the_agents_go_on_by_themselves_when_the_cut_off_host_is_back(faulty, hosts):
    agents = start(faulty, hosts, max_restarts=3)
    cut_at(12, faulty, hosts, agents)
    deadline = time.monotonic() + ENDED
    while not all("no progress" in agent.output for agent in agents):
        assert time.monotonic() < deadline, "\n".join(agent.output for agent in agents)
        time.sleep(0.1)
    hosts.mend()
    ends = ended(agents, 120)
    assert_finished(ends)
    assert any("going on from run/checkpoints/" in output for _, output in ends)
    assert losses(faulty) == undisturbed(faulty, hosts)


def test_a_cut_that_is_shorter_than_the_timeout_stops_nothing(faulty, hosts):
    agents = start(faulty, hosts)
    cut_at(12, faulty, hosts, agents)
    time.sleep(0.5)
    hosts.mend()
    ends = ended(agents, 120)
    assert_finished(ends)
    assert losses(faulty) == undisturbed(faulty, hosts)

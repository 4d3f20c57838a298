"""Streams, events, and the time between events."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from core_plugin.testing.device.comparison import normal

pytestmark = pytest.mark.level(1)


@pytest.mark.only("accelerator")
def test_synchronize_waits_for_the_device(device: torch.device) -> None:
    """Waiting for the device works by its module and by ``torch.accelerator``."""
    x = torch.ones(8, device=device) * 2
    torch.get_device_module(device).synchronize()
    torch.accelerator.synchronize(device)
    assert x.sum().item() == 16


@pytest.mark.requires("streams")
def test_a_stream_is_the_current_one_inside_its_block(device: torch.device) -> None:
    """A stream is current inside ``with stream``, and the one before it is afterwards."""
    module = torch.get_device_module(device)
    before = torch.accelerator.current_stream(device)
    stream = torch.Stream(device=device)
    with stream:
        assert torch.accelerator.current_stream(device) == stream
    assert torch.accelerator.current_stream(device) == before
    own = module.Stream()
    with module.stream(own):
        assert module.current_stream().stream_id == own.stream_id
    assert module.current_stream().stream_id == before.stream_id


@pytest.mark.requires("streams")
def test_work_on_a_stream_is_done_once_it_was_waited_for(device: torch.device) -> None:
    """A stream that waits for another sees its results; ``synchronize`` ends all work on it."""
    x = normal(64, 64)
    producer, consumer = torch.Stream(device=device), torch.Stream(device=device)
    with producer:
        made = x.to(device) @ x.to(device)
    consumer.wait_stream(producer)
    with consumer:
        result = made.sum(dim=0) * 2
    consumer.synchronize()
    assert consumer.query(), "the stream is not done after synchronize"
    torch.testing.assert_close(result.cpu(), (x @ x).sum(dim=0) * 2, rtol=1e-4, atol=1e-3)


@pytest.mark.requires("events")
def test_an_event_is_reached_once_it_was_waited_for(device: torch.device) -> None:
    """After ``synchronize``, the event is reached and the work before it done; it is used twice."""
    event, stream = torch.Event(device=device), torch.accelerator.current_stream(device)
    x = torch.ones(64, 64, device=device)
    for _ in range(2):
        x = x * 2
        event.record(stream)
        event.synchronize()
        assert event.query(), "the event is not reached after synchronize"
    event.wait(stream)
    assert x.sum().item() == 4 * 64 * 64


@pytest.mark.requires("event_timing")
def test_the_time_between_events_is_that_of_the_clock(device: torch.device) -> None:
    """``elapsed_time`` gives milliseconds: at least those that passed, and no more."""
    stream = torch.accelerator.current_stream(device)
    start = torch.Event(device=device, enable_timing=True)
    end = torch.Event(device=device, enable_timing=True)
    began = time.perf_counter()
    start.record(stream)
    start.synchronize()
    time.sleep(0.02)
    end.record(stream)
    end.synchronize()
    passed = 1000 * (time.perf_counter() - began)
    elapsed = start.elapsed_time(end)
    assert 19 <= elapsed <= passed + 1, f"{elapsed} ms between events that are {passed} ms apart"


@pytest.mark.requires("event_timing")
def test_the_time_of_work_is_not_negative(device: torch.device) -> None:
    """Events around short pieces of work are in order."""
    stream = torch.accelerator.current_stream(device)
    events = [torch.Event(device=device, enable_timing=True) for _ in range(5)]
    x = torch.ones(16, 16, device=device)
    for event in events:
        event.record(stream)
        x = x @ x / 16
    events[-1].synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    assert all(elapsed >= 0 for elapsed in times), f"the times are {times} ms"

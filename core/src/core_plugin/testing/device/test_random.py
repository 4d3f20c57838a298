"""Random numbers on the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from core_plugin.testing.device.subject import Subject

pytestmark = pytest.mark.level(1)


def _draw(device: torch.device) -> Tensor:
    """Numbers of several distributions."""
    numbers = [
        torch.rand(8, device=device),
        torch.randn(8, device=device),
        torch.randint(1000, (8,), device=device).float(),
        torch.randperm(8, device=device).float(),
        torch.empty(8, device=device).uniform_(-1, 1),
        F.dropout(torch.ones(8, device=device)),
        torch.bernoulli(torch.full((8,), 0.5, device=device)),
        torch.multinomial(torch.ones(8, device=device), 4).float(),
    ]
    return torch.cat(numbers).cpu()


def test_a_seed_gives_the_same_numbers_again(device: torch.device) -> None:
    """``torch.manual_seed`` decides what the device draws; another seed or draw, other numbers."""
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(_draw(device))
    assert torch.equal(draws[0], draws[1]), "the same seed gave other numbers"
    assert not torch.equal(draws[0], draws[2]), "another seed gave the same numbers"
    assert not torch.equal(draws[2], _draw(device)), "a second draw gave the same numbers"


def test_numbers_have_their_distribution(device: torch.device) -> None:
    """Uniform, normal and dropped-out numbers have about the mean and variance they should."""
    torch.manual_seed(1)
    count = 40_000
    uniform, normal = torch.rand(count, device=device), torch.randn(count, device=device)
    kept = F.dropout(torch.ones(count, device=device), 0.25)
    assert 0 <= uniform.min().item() <= uniform.max().item() <= 1
    found = [t.item() for x in (uniform, normal, kept) for t in (x.mean(), x.var())]
    expected = [1 / 2, 1 / 12, 0.0, 1.0, 1.0, 1 / 3]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=0.03)


@pytest.mark.requires("generator")
def test_a_generator_of_the_device(device: torch.device) -> None:
    """A generator is seeded and goes on by itself, and its state can be put back."""
    generator = torch.Generator(device=device).manual_seed(1)
    torch.manual_seed(1)
    expected = _draw(device)
    torch.manual_seed(1)
    first = torch.randn(8, device=device, generator=generator).cpu()
    state = generator.get_state()
    second = torch.randn(8, device=device, generator=generator).cpu()
    assert torch.equal(_draw(device), expected), "it changed what is drawn without it"
    generator.set_state(state)
    again = torch.randn(8, device=device, generator=generator).cpu()
    assert torch.equal(again, second), "its state did not come back"
    generator.manual_seed(1)
    again = torch.randn(8, device=device, generator=generator).cpu()
    assert torch.equal(again, first), "the same seed gave other numbers"
    assert not torch.equal(first, second), "two draws are the same"


@pytest.mark.only("accelerator")
@pytest.mark.requires("generator")
def test_the_device_and_the_cpu_have_a_generator_each(device: torch.device) -> None:
    """Draws on the device change none on the CPU, and the other way round."""
    torch.Generator(device=device)
    torch.manual_seed(1)
    of_cpu, of_device = torch.rand(8), _draw(device)
    torch.manual_seed(1)
    _draw(device)
    assert torch.equal(torch.rand(8), of_cpu), "draws on the device changed those on the CPU"
    torch.manual_seed(1)
    torch.rand(100)
    assert torch.equal(_draw(device), of_device), "draws on the CPU changed those on the device"


@pytest.mark.requires("multiple_devices")
def test_each_index_has_a_generator(device: torch.device, other_device: torch.device) -> None:
    """A seed counts for all indices, and draws on one change none on another."""
    torch.manual_seed(1)
    expected = _draw(other_device)
    torch.manual_seed(1)
    _draw(device)
    again = _draw(other_device)
    assert torch.equal(again, expected), f"draws on {device} changed those on {other_device}"


def test_a_state_that_was_saved_comes_back(device: torch.device, subject: Subject) -> None:
    """The plugin's ``rng_state`` and ``set_rng_state`` repeat what was drawn in between."""
    implementation = subject.implementation
    torch.manual_seed(1)
    torch.rand(3, device=device)
    host, state = torch.get_rng_state(), implementation.rng_state(device)
    first = _draw(device)
    torch.manual_seed(2)
    torch.set_rng_state(host)
    if state is not None:
        implementation.set_rng_state(device, state)
    assert torch.equal(_draw(device), first), "other numbers came after the saved state"


def test_forked_draws_leave_no_trace(device: torch.device) -> None:
    """After ``torch.random.fork_rng`` the device draws as if nothing had happened inside."""
    indices = [] if device.type == "cpu" else [device.index]
    torch.manual_seed(1)
    expected = _draw(device)
    torch.manual_seed(1)
    with torch.random.fork_rng(indices, device_type=device.type):
        torch.manual_seed(7)
        _draw(device)
    assert torch.equal(_draw(device), expected), "draws inside changed those after it"


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_drops_the_same_again(
    device: torch.device, reentrant: bool
) -> None:
    """What dropout dropped in forward is dropped again when backward computes it anew."""
    x = torch.ones(64, device=device, requires_grad=True)
    torch.manual_seed(1)
    output = checkpoint(lambda x: F.dropout(x * x) / 2, x, use_reentrant=reentrant)
    torch.rand(8, device=device)
    output.sum().backward()
    assert x.grad is not None, "no gradient arrived"
    torch.testing.assert_close(x.grad.cpu(), 2 * output.detach().cpu())
    assert 0 < output.count_nonzero().item() < 64

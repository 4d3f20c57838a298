"""The tensors of a model and its optimizer: strict, complete, and the same after a round trip."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from core_plugin import state, tensors
from core_plugin.errors import CheckpointError

# torch's distributed checkpoint warns that one process saves alone, which is what is meant here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def trained(optimizer_type=torch.optim.AdamW, steps=3, **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = optimizer_type(model.parameters(), lr=0.1, **options)
    step(model, optimizer, steps)
    return model, optimizer


def step(model, optimizer, steps=1):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=generator)).square().mean().backward()
        optimizer.step()


def saved(tmp_path, model, optimizer, **options):
    tmp_path.mkdir(exist_ok=True)
    state.save(model, optimizer, tmp_path, **{"include_frozen": True} | options)
    return tmp_path


OPTIMIZERS = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.NAdam, {}),
    (torch.optim.Adamax, {}),
]


@pytest.mark.parametrize(("optimizer_type", "options"), OPTIMIZERS)
def test_a_loaded_optimizer_goes_on_bit_for_bit(tmp_path, optimizer_type, options):
    model, optimizer = trained(optimizer_type, **options)
    directory = saved(tmp_path, model, optimizer)
    torch.manual_seed(9)
    fresh = Net()
    other = optimizer_type(fresh.parameters(), lr=0.5, **options)
    state.load(fresh, other, directory, include_frozen=True)
    assert other.param_groups[0]["lr"] == 0.1
    step(model, optimizer)
    step(fresh, other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name


def test_what_is_staged_is_of_its_moment_and_needs_no_process_group(tmp_path):
    model, optimizer = trained()
    at_once = saved(tmp_path / "at-once", model, optimizer)
    write = state.stage(model, optimizer, include_frozen=True)
    step(model, optimizer)
    (tmp_path / "staged").mkdir()
    write(tmp_path / "staged", None)
    for file in at_once.iterdir():
        if file.name != ".metadata":  # which has a time in it
            assert file.read_bytes() == (tmp_path / "staged" / file.name).read_bytes(), file


def test_state_made_before_the_first_step_does_not_keep_the_rest_from_being_loaded(tmp_path):
    """A flag in ``optimizer.state`` makes torch's own loading skip all that is missing there."""
    model, optimizer = trained()
    for parameter in model.parameters():
        optimizer.state[parameter]["flag"] = True
    directory = saved(tmp_path, model, optimizer)
    fresh = Net()
    other = torch.optim.AdamW(fresh.parameters(), lr=0.1)
    for parameter in fresh.parameters():
        other.state[parameter]["flag"] = False
    state.load(fresh, other, directory, include_frozen=True)
    for parameter, original in zip(fresh.parameters(), model.parameters(), strict=True):
        assert other.state[parameter]["flag"] is True
        assert torch.equal(other.state[parameter]["exp_avg"], optimizer.state[original]["exp_avg"])


def test_every_difference_is_reported_and_nothing_is_changed(tmp_path):
    model, optimizer = trained()
    directory = saved(tmp_path, model, optimizer)
    fresh = Net(width=5)
    fresh.last = nn.Linear(5, 2, bias=False)
    fresh.extra = nn.Linear(1, 1)
    other = torch.optim.AdamW(fresh.parameters())
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(CheckpointError) as caught:
        state.load(fresh, other, directory, include_frozen=True)
    text = str(caught.value)
    assert "model.extra.weight is not in it" in text
    assert "model.last.bias is in it, but not in the run" in text
    assert "model.first.weight has the shape (4, 3) in it, and (5, 3) in the run" in text
    assert "other parameter groups" in text
    assert all(torch.equal(before[n], t) for n, t in fresh.state_dict().items())
    assert not other.state


def test_a_trained_tensor_without_its_state_is_an_error(tmp_path):
    model, optimizer = trained()
    directory = saved(tmp_path, model, optimizer)
    text = (directory / "optimizer.json").read_text()
    (directory / "optimizer.json").write_text(text.replace('"exp_avg", "exp', '"exp', 1))
    fresh = Net()
    with pytest.raises(CheckpointError, match=r"optimizer\.first\.weight\.exp_avg is in it"):
        state.load(fresh, torch.optim.AdamW(fresh.parameters()), directory, include_frozen=True)


def test_another_optimizers_state_is_an_error(tmp_path):
    directory = saved(tmp_path, *trained(torch.optim.SGD, momentum=0.9))
    fresh = Net()
    optimizer = torch.optim.SGD(
        [{"params": part.parameters()} for part in (fresh.first, fresh.last, fresh.norm)]
    )
    with pytest.raises(CheckpointError, match="other parameter groups"):
        state.load(fresh, optimizer, directory, include_frozen=True)


def test_an_option_that_no_checkpoint_can_hold_is_an_error(tmp_path):
    model, optimizer = trained()
    optimizer.param_groups[0]["dtype"] = torch.float32
    with pytest.raises(CheckpointError, match="AdamW keeps something that is neither a tensor"):
        saved(tmp_path, model, optimizer)


@pytest.mark.parametrize(("fused", "device"), [(False, "cpu"), (True, "meta")])
def test_a_step_counter_is_where_its_kernel_reads_it(fused, device):
    """On ``meta``, which stands in for a device here: only where things are put is looked at."""
    model = Net().to("meta")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    optimizer.param_groups[0]["fused"] = fused
    stored = TensorStorageMetadata(TensorProperties(), torch.Size([]), [])
    saved_state = {"first.weight": {"values": {}, "tensors": ["step"]}}
    like = state._state_like(model, optimizer, saved_state, {"optimizer.first.weight.step": stored})
    assert like["first.weight"]["step"].device.type == device


def test_frozen_parameters_can_be_left_out(tmp_path):
    model, _ = trained()
    model.first.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    step(model, optimizer)
    directory = saved(tmp_path, model, optimizer, include_frozen=False)
    fresh = Net()
    fresh.first.requires_grad_(False)
    untouched = fresh.first.weight.clone()
    other = torch.optim.AdamW([p for p in fresh.parameters() if p.requires_grad])
    state.load(fresh, other, directory, include_frozen=False)
    assert torch.equal(fresh.first.weight, untouched)
    assert torch.equal(fresh.last.weight, model.last.weight)
    assert torch.equal(fresh.norm.running_mean, model.norm.running_mean)


def test_an_optimizer_of_other_parameters_is_refused():
    model = Net()
    wrong = {
        "are in none of its groups": torch.optim.SGD(model.first.parameters()),
        "are not trained": torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))]),
    }
    for message, optimizer in wrong.items():
        with pytest.raises(CheckpointError, match=message):
            state.check_optimizer(model, optimizer)
    with warnings.catch_warnings(action="ignore"):
        twice = torch.optim.SGD([*model.parameters()])
        twice.param_groups.append(dict(twice.param_groups[0]))
    with pytest.raises(CheckpointError, match="in two groups"):
        state.check_optimizer(model, twice)


@pytest.mark.parametrize("max_norm", [None, 0.01, 1e6])
def test_clipping_is_torchs(max_norm):
    model, _ = trained()
    model.zero_grad()
    model(torch.randn(5, 3)).square().mean().backward()
    expected = copy.deepcopy(model)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        theirs.grad = mine.grad.clone()
    norm = nn.utils.clip_grad_norm_(expected.parameters(), max_norm or float("inf"))
    torch.testing.assert_close(state.clip_grad_norm(model.parameters(), max_norm), norm)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_names_do_not_show_wrappers():
    assert tensors.canonical_name("layers.0._orig_mod.weight") == "layers.0.weight"
    assert tensors.canonical_name("_checkpoint_wrapped_module.a.weight") == "a.weight"

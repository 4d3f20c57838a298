"""Views: tensors that look at another one's memory, and what is written through them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from core_plugin.testing.device.values import assert_equal, sample

pytestmark = pytest.mark.level(1)

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "alias": torch.ops.aten.alias,
    "detach": lambda x: x.detach(),
    "select": lambda x: x[2],
    "slice": lambda x: x[1:, ::2],
    "narrow": lambda x: x.narrow(1, 1, 3),
    "view": lambda x: x.view(2, 12),
    "reshape": lambda x: x.reshape(-1),
    "flatten": lambda x: x.flatten(),
    "transpose": lambda x: x.t(),
    "permute": lambda x: x.view(2, 2, 6).permute(2, 0, 1),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "chunk": lambda x: x.chunk(2, dim=1)[1],
    "split": lambda x: x.split([1, 3])[1],
    "unbind": lambda x: x.unbind(1)[4],
    "diagonal": lambda x: x.diagonal(offset=1),
    "as_strided": lambda x: x.as_strided((2, 3), (1, 7), 3),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "view of a transposed": lambda x: x.t()[2:4].unsqueeze(0),
    "unfold without overlap": lambda x: x.unfold(1, 3, 3),
}
"""Views of a tensor of 4 by 6, in which no two elements are one."""

OVERLAPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "expand": lambda x: x[:, :1].expand(-1, 5),
    "expand to more dimensions": lambda x: x.expand(3, 4, 6),
    "broadcast_to": lambda x: torch.broadcast_to(x[0], (2, 6)),
    "unfold": lambda x: x.unfold(1, 3, 1),
    "as_strided": lambda x: x.as_strided((4, 4), (1, 1)),
}


def _add_with_foreach(x: Tensor) -> None:
    torch._foreach_add_([x], 2)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "fill": lambda x: x.fill_(3),
    "zero": lambda x: x.zero_(),
    "add": lambda x: x.add_(1),
    "multiply by a tensor": lambda x: x.mul_(x.clone()),
    "copy": lambda x: x.copy_(torch.full(x.shape, 4.0)),
    "assign": lambda x: x.__setitem__(0, 9),
    "assign at indices": lambda x: x.__setitem__(torch.tensor([0], device=x.device), 8),
    "assign by a mask": lambda x: x.__setitem__(x > 0, -8),
    "fill by a mask": lambda x: x.masked_fill_(x < 0, 7),
    "foreach": _add_with_foreach,
    "an output": lambda x: torch.add(x, 1, out=x),
    "clamp": lambda x: x.clamp_(-1, 1),
}


def _start(view: Tensor) -> int:
    """Where a view's first element is."""
    return view.untyped_storage().data_ptr() + int(view.storage_offset()) * view.element_size()


@pytest.mark.parametrize("name", [*VIEWS, *(f"{name} (overlapping)" for name in OVERLAPPING)])
def test_a_view_shares_its_bases_memory(device: torch.device, name: str) -> None:
    """A view has the CPU's values and strides, and sees what is written into its base."""
    make = VIEWS.get(name) or OVERLAPPING[name.removesuffix(" (overlapping)")]
    here, there = sample(4, 6), sample(4, 6).to(device)
    expected, view = make(here), make(there)
    assert_equal(view, expected, on=device)
    assert view.stride() == expected.stride(), f"its strides are {view.stride()}"
    assert view.storage_offset() == expected.storage_offset()
    assert view.untyped_storage().data_ptr() == there.untyped_storage().data_ptr()
    assert view.data_ptr() == _start(view)
    there.mul_(2).add_(1)
    here.mul_(2).add_(1)
    assert_equal(view, expected, on=device)


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_through_a_view_is_in_its_base(device: torch.device, write: str) -> None:
    """In-place operators on any view write into the base, there alone, and return the view."""
    for name, make in VIEWS.items():
        here, there = sample(4, 6), sample(4, 6).to(device)
        view = make(there)
        result = WRITES[write](view)
        assert result is None or result is view, f"{write} through {name} gives another tensor"
        WRITES[write](make(here))
        assert torch.equal(there.cpu(), here), f"{write} through {name} gives {there.cpu()}"


def test_views_of_views_share_too(device: torch.device) -> None:
    """Views of a view, and all pieces of a tensor, write into one memory."""
    here, there = torch.zeros(4, 6), torch.zeros(4, 6, device=device)
    for base in (here, there):
        for number, piece in enumerate(base.t().chunk(3)):
            piece[1].add_(number + 1)
            piece.t()[::2].mul_(3)
        base.view(-1)[5:19].view(2, 7)[1, 2:4] = -1
    assert_equal(there, here, on=device)


def test_a_reshape_copies_only_where_it_must(device: torch.device) -> None:
    """``reshape`` and ``contiguous`` give the tensor itself or a view if there is one."""
    there = sample(4, 6).to(device)
    assert there.contiguous() is there
    assert there.reshape(24).data_ptr() == there.data_ptr()
    for copy in (there.t().reshape(24), there.t().contiguous(), there.clone()):
        assert copy.data_ptr() != there.data_ptr()
    assert_equal(there.t().reshape(24), sample(4, 6).t().reshape(24), on=device)
    with pytest.raises(RuntimeError):
        there.t().view(24)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.bfloat16])
def test_memory_is_seen_as_another_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """``view(dtype)`` reads and writes the same bits as another type."""
    here, there = sample(3, 4), sample(3, 4).to(device)
    assert_equal(there.view(dtype), here.view(dtype), on=device)
    for base in (here, there):
        base.view(dtype)[1].zero_()
    assert_equal(there, here, on=device)


def test_gradients_go_through_views(device: torch.device) -> None:
    """A gradient through each view is the CPU's."""
    for name, make in {**VIEWS, **OVERLAPPING}.items():
        if name == "detach":
            continue
        here = sample(4, 6).requires_grad_()
        there = sample(4, 6).to(device).requires_grad_()
        for leaf in (here, there):
            made = make(leaf)
            made.backward(sample(*made.shape, seed=1).to(leaf.device))
        assert here.grad is not None
        assert there.grad is not None, f"{name} gives no gradient"
        assert there.grad.device == device
        assert torch.equal(there.grad.cpu(), here.grad), f"{name} gives {there.grad.cpu()}"


IDENTITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda x: x.clone(),
    "alias": torch.ops.aten.alias,
    "view_as": lambda x: x.view_as(x),
    "contiguous": lambda x: x.t().contiguous().t(),
    "the same device": lambda x: x.to(x.device, copy=True),
    "another device and back": lambda x: x.cpu().to(x.device),
    "another dtype and back": lambda x: x.double().float() if x.is_cpu else x.half().float(),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_the_identity_passes_values_and_gradients(device: torch.device, name: str) -> None:
    """What changes nothing gives the value forward and the gradient backward."""
    values = sample(4, 6).to(device).requires_grad_()
    result = IDENTITIES[name](values)
    assert_equal(result.detach(), sample(4, 6), on=device)
    result.backward(sample(4, 6, seed=1).to(device))
    assert values.grad is not None
    assert_equal(values.grad, sample(4, 6, seed=1), on=device)


def test_a_negative_view_is_resolved(device: torch.device) -> None:
    """A view with the negative bit is negated by operators and copies, in both directions."""
    values, there = sample(3, 4), sample(3, 4).to(device)
    negative = torch._neg_view(there)
    assert negative.is_neg()
    assert_equal(negative.resolve_neg(), -values, on=device)
    assert_equal(negative * 2, -values * 2, on=device)
    assert_equal(negative, -values, on=device)
    assert_equal(torch.zeros_like(there).copy_(negative), -values, on=device)
    assert_equal(there.clone().copy_(torch._neg_view(values)), -values, on=device)
    negative.fill_(2)
    assert_equal(there, torch.full((3, 4), -2.0), on=device)


@pytest.mark.requires("complex_numbers")
def test_a_conjugate_view_is_resolved(device: torch.device) -> None:
    """A conjugate is a view that operators and copies resolve, in both directions."""
    values = sample(3, 4, dtype=torch.complex64)
    there = values.to(device)
    conjugate, expected = there.conj(), values.conj().resolve_conj()
    assert conjugate.is_conj()
    assert conjugate.data_ptr() == there.data_ptr()
    assert_equal(conjugate.resolve_conj(), expected, on=device)
    assert_equal(conjugate + 1, expected + 1, on=device)
    assert_equal(conjugate.cpu().resolve_conj(), expected, on=torch.device("cpu"))
    assert_equal(values.conj().to(device).resolve_conj(), expected, on=device)
    assert_equal(conjugate.imag.resolve_neg(), -values.imag, on=device)
    assert_equal(torch.view_as_real(there), torch.view_as_real(values), on=device)
    conjugate.mul_(2j)
    assert_equal(there, (expected * 2j).conj().resolve_conj(), on=device)
    there.real.zero_()
    assert_equal(there.real, torch.zeros(3, 4), on=device)

"""How a linear layer with one adapter is computed: as one operation where nothing can tell."""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as all_modules
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from core_plugin.adapters import add_adapter, inject, set_adapter
from core_plugin_lora import fused
from core_plugin_lora.plugin import LoRA, LoRAParams

INPUTS, OUTPUTS, SCALING = 6, 5, 2.0


class Conv1D(nn.Module):
    """GPT-2's linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.nf, self.nx = OUTPUTS, INPUTS
        self.weight = nn.Parameter(torch.randn(INPUTS, OUTPUTS))
        self.bias = nn.Parameter(torch.randn(OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"
BASES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(INPUTS, OUTPUTS),
    "no bias": lambda: nn.Linear(INPUTS, OUTPUTS, bias=False),
    "gpt2": Conv1D,
}


def model(base: nn.Module | None = None, seed: int = 0, **settings: Any) -> nn.ModuleDict:
    torch.manual_seed(seed)
    m = nn.ModuleDict({"x": base or nn.Linear(INPUTS, OUTPUTS)})
    defaults: dict[str, Any] = {"r": 3, "lora_alpha": 3 * SCALING, "target_modules": ["x"]}
    inject(m, LoRA, LoRAParams(**{**defaults, **settings}))
    with torch.no_grad():
        for parameter in m.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter)
    return m


def made(kind: str = "linear", **settings: Any) -> Any:
    torch.manual_seed(0)
    return model(BASES[kind](), **settings)["x"]


def is_one_operation(result: Tensor) -> bool:
    node: Any = result.grad_fn
    while node.name() == "ViewBackward0":
        node = node.next_functions[0][0]
    return node.name() == "_LinearBackward"


def mathematics(layer: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    base = layer.base_layer
    weight = base.weight.T if isinstance(base, Conv1D) else base.weight
    y = x @ (weight.detach().to(x.dtype) + SCALING * b @ a).T
    return y if base.bias is None else y + base.bias.to(x.dtype)


def factors(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.factors("default")[0]


def assert_is_the_mathematics(layer: Any, x: Tensor, result: Tensor) -> None:
    """The result, and the gradients for the input and the adapter."""
    a, b = (f.detach().double().requires_grad_() for f in factors(layer))
    wide = x.detach().double().requires_grad_()
    expected = mathematics(layer, wide, a, b)
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)
    upstream = torch.randn_like(result)
    expected_grads = torch.autograd.grad(expected, (wide, a, b), upstream.double())
    grads = torch.autograd.grad(result, (x, *factors(layer)), upstream)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(BASES)),
    shape=st.lists(st.integers(0, 4), max_size=3),
    strided=st.booleans(),
)
def test_it_is_the_mathematics(kind: str, shape: list[int], strided: bool) -> None:
    layer = made(kind)
    x = torch.randn(*shape, INPUTS)
    if strided and x.dim() > 1:
        x = torch.randn(INPUTS, *reversed(shape)).mT if x.dim() == 2 else x.transpose(0, -2)
    x.requires_grad_()
    result = layer(x)
    assert is_one_operation(result)
    assert_is_the_mathematics(layer, x, result)


@pytest.mark.parametrize("kind", BASES)
def test_it_is_the_mathematics_for_many_tokens(kind: str) -> None:
    layer, x = made(kind), torch.randn(fused.MANY, INPUTS, requires_grad=True)
    assert_is_the_mathematics(layer, x, layer(x))


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("needing", ["x", "a", "b", "xa", "xb", "ab", "xab"])
def test_each_gradient_for_itself_also_of_gradients(kind: str, needing: str) -> None:
    layer = made(kind).double()
    x = torch.randn(2, 3, INPUTS, dtype=torch.float64, requires_grad="x" in needing)
    a, b = factors(layer)
    a.requires_grad_("a" in needing)
    b.requires_grad_("b" in needing)
    assert is_one_operation(layer(x))

    def apply(*_: Tensor) -> Tensor:
        return layer(x)

    leaves = tuple(t for t in (x, a, b) if t.requires_grad)
    assert torch.autograd.gradcheck(apply, leaves)
    assert torch.autograd.gradgradcheck(apply, leaves)


def test_a_trained_bias_of_the_base_gets_its_gradient() -> None:
    layer, x = made(bias="lora_only"), torch.randn(4, INPUTS)
    result = layer(x)
    assert is_one_operation(result)
    result.backward(upstream := torch.randn_like(result))
    torch.testing.assert_close(layer.base_layer.bias.grad, upstream.sum(0))


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_dropout_is_of_the_adapters_input_alone(p: float) -> None:
    layer = made(lora_dropout=p).double()
    x = torch.randn(7, INPUTS, dtype=torch.float64, requires_grad=True)

    def apply(*_: Tensor) -> Tensor:
        torch.manual_seed(3)
        return layer(x)

    assert is_one_operation(apply())
    torch.manual_seed(3)
    seen, _ = torch.native_dropout(x, p, True)
    a, b = factors(layer)
    expected = layer.base_layer(x) + SCALING * seen @ a.T @ b.T
    torch.testing.assert_close(apply(), expected)
    assert torch.autograd.gradcheck(apply, (x, a, b))
    assert torch.autograd.gradgradcheck(apply, (x, a, b))
    layer.eval()
    torch.testing.assert_close(layer(x), mathematics(layer, x, a, b))


def test_dropout_drops_the_share_that_was_asked_for() -> None:
    layer = model(nn.Linear(200, 1), r=1, lora_alpha=1, lora_dropout=0.25)["x"]
    for factor in factors(layer):
        nn.init.ones_(factor)
    x = torch.ones(500, 200)
    for result in (layer(x), through_modules(layer)(x)):
        kept = (result - layer.base_layer(x)) * 0.75
        assert kept.std() > 1
        assert kept.mean().item() == pytest.approx(150, rel=0.01)
        torch.testing.assert_close(kept, kept.round(), rtol=0, atol=1e-2)


def through_modules(layer: Any) -> Any:
    """A copy whose base layer has a hook, so that the modules are called."""
    other = copy.deepcopy(layer)
    other.base_layer.register_forward_hook(lambda module, inputs, output: None)
    return other


# Where something could tell


class Subclass(Tensor):
    pass


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def hooked(register: str, part: str) -> Callable[[Any, list[Any]], None]:
    def change(layer: Any, seen: list[Any]) -> None:
        module = layer.base_layer if part == "base" else getattr(layer, f"lora_{part}")["default"]
        getattr(module, register)(lambda *args: seen.append(part))

    return change


def own_forward(layer: Any, seen: list[Any]) -> None:
    forward = layer.base_layer.forward
    layer.base_layer.forward = lambda x: (seen.append("base"), forward(x))[1]


HOOKS = {
    f"{register} {part}": hooked(register, part)
    for register in (
        "register_forward_pre_hook",
        "register_forward_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    )
    for part in ("base", "A", "B")
} | {"an own forward": own_forward}


@pytest.mark.parametrize("change", HOOKS.values(), ids=HOOKS)
def test_hooks_run_and_the_numbers_are_the_same(change: Callable[[Any, list[Any]], None]) -> None:
    layer, seen = made(), []
    x = torch.randn(4, INPUTS, requires_grad=True)
    assert is_one_operation(layer(x))
    change(layer, seen)
    result = layer(x)
    assert not is_one_operation(result)
    assert_is_the_mathematics(layer, x, result)
    assert len(seen) == 1


def test_hooks_on_all_modules_run() -> None:
    layer, seen = made(), []
    handle = all_modules.register_module_forward_hook(lambda m, i, o: seen.append(m))
    try:
        layer(torch.randn(4, INPUTS))
    finally:
        handle.remove()
    parts = [layer.base_layer, layer.lora_A["default"], layer.lora_B["default"], layer]
    assert seen == parts


def test_a_base_that_is_trained() -> None:
    layer, x = made(), torch.randn(4, INPUTS, requires_grad=True)
    layer.base_layer.weight.requires_grad_()
    assert_is_the_mathematics(layer, x, layer(x))
    layer(x).sum().backward()
    torch.testing.assert_close(layer.base_layer.weight.grad, x.detach().sum(0).expand(OUTPUTS, -1))


def test_a_parametrized_base() -> None:
    layer, x = made(), torch.randn(4, INPUTS)
    parametrize.register_parametrization(layer.base_layer, "weight", Doubled())
    result = layer(x)
    a, b = factors(layer)
    torch.testing.assert_close(result, layer.base_layer(x) + SCALING * x @ a.T @ b.T)


def test_a_tensor_of_another_class() -> None:
    layer, x = made(), torch.randn(4, INPUTS)
    result = layer(x.as_subclass(Subclass))
    assert type(result) is Subclass
    torch.testing.assert_close(result.as_subclass(Tensor), layer(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in jvp
def test_transforms_of_functions() -> None:
    layer = made().double()
    x, tangent = torch.randn(2, 4, INPUTS, dtype=torch.float64)
    a, b = (f.detach() for f in factors(layer))
    weight = layer.base_layer.weight.detach() + SCALING * b @ a
    torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x))
    grad = torch.func.grad(lambda x: layer(x).sum())(x)
    torch.testing.assert_close(grad, weight.sum(0).expand_as(x))
    _, pushed = torch.func.jvp(layer, (x,), (tangent,))
    torch.testing.assert_close(pushed, tangent @ weight.T)
    with forward_ad.dual_level():
        dual = layer(forward_ad.make_dual(x, tangent))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, tangent @ weight.T)


def test_another_dtype_is_as_wrong_as_without_the_adapter() -> None:
    layer, x = made(), torch.randn(4, INPUTS, dtype=torch.float64)
    with pytest.raises(RuntimeError) as expected:
        layer.base_layer(x)
    with pytest.raises(RuntimeError) as caught:
        layer(x)
    assert str(caught.value) == str(expected.value)


def test_too_many_arguments_are_as_wrong_as_without_the_adapter() -> None:
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        made()(torch.randn(4, INPUTS), None)


# What is kept for the backward pass


def saved(function: Callable[[], Any], layer: Any) -> tuple[int, set[torch.dtype]]:
    """The bytes that are kept, and their dtypes, without parameters."""
    kept: dict[int, Tensor] = {}
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    assert result.requires_grad
    return sum(t.untyped_storage().nbytes() for t in kept.values()), {
        t.dtype for t in kept.values()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_only_the_input_its_product_and_a_mask_are_kept(dtype: torch.dtype, p: float) -> None:
    base = nn.Linear(64, 96).to(dtype)
    layer = model(base, r=4, lora_dropout=p)["x"]
    x = torch.randn(32, 64, dtype=dtype, requires_grad=True)
    size, dtypes = saved(lambda: layer(x), layer)
    rounded = 0 if dtype == torch.float32 else 4 * (64 + 96)  # A and B
    assert size == (32 * (64 + 4) + rounded) * dtype.itemsize + (32 * 64 if p else 0)
    assert dtypes <= {dtype, torch.bool}


def test_no_copy_of_a_weight_is_kept_under_autocast() -> None:
    layer = model(nn.Linear(64, 96), r=4)["x"]
    x = torch.randn(32, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        size, dtypes = saved(lambda: layer(x), layer)
    assert size == (32 * (64 + 4) + 4 * (64 + 96)) * 2
    assert dtypes == {torch.bfloat16}


# Precision


@pytest.mark.parametrize("one_operation", [True, False])
@pytest.mark.parametrize("kind", BASES)
def test_a_base_in_fewer_bits(kind: str, one_operation: bool) -> None:
    layer = made(kind).bfloat16()
    for factor in factors(layer):
        factor.data = factor.data.float()
    layer = layer if one_operation else through_modules(layer)
    x = torch.randn(9, INPUTS, dtype=torch.bfloat16, requires_grad=True)
    result = layer(x)
    assert is_one_operation(result) == one_operation
    assert result.dtype == torch.bfloat16
    expected = mathematics(layer, x.double(), *(f.double() for f in factors(layer)))
    assert (result - expected).abs().max() < 0.02 * expected.abs().max()
    result.sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert all(f.grad.dtype == torch.float32 for f in factors(layer))


@pytest.mark.parametrize("one_operation", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_autocast(one_operation: bool, dtype: torch.dtype, given: torch.dtype) -> None:
    layer = made() if one_operation else through_modules(made())
    x = torch.randn(9, INPUTS).to(given).requires_grad_()
    with torch.autocast("cpu", dtype):
        result, of_base = layer(x), layer.base_layer(x)
    assert is_one_operation(result) == one_operation
    assert result.dtype == of_base.dtype == dtype
    a, b = (f.detach().double().requires_grad_() for f in factors(layer))
    expected = mathematics(layer, x.detach().double(), a, b)
    assert (result - expected).abs().max() < 0.02 * expected.abs().max()
    result.sum().backward()
    expected.sum().backward()
    assert x.grad.dtype == given
    for factor, wide in zip(factors(layer), (a, b), strict=True):
        assert factor.grad.dtype == torch.float32
        assert (factor.grad - wide.grad).abs().max() < 0.02 * wide.grad.abs().max()


def test_autocast_leaves_float64_alone() -> None:
    layer = made().double()
    x = torch.randn(9, INPUTS, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        result, of_base = layer(x), layer.base_layer(x)
    assert result.dtype == of_base.dtype == torch.float64
    a, b = factors(layer)
    expected = mathematics(layer, x, a, b)
    assert (result - expected).abs().max() < 0.02 * expected.abs().max()


# Life with the rest of torch


def test_the_result_can_be_changed_in_place() -> None:
    layer, x = made(), torch.randn(2, 4, INPUTS, requires_grad=True)
    a, b = factors(layer)
    torch.testing.assert_close(torch.relu_(layer(x)), torch.relu(mathematics(layer, x, a, b)))
    torch.relu_(layer(x)).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_recomputed_in_the_backward_pass(reentrant: bool, p: float) -> None:
    grads = []
    for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=reentrant)):
        layer, x = made(lora_dropout=p), torch.randn(4, INPUTS, requires_grad=True)
        torch.manual_seed(1)
        run(layer, x).square().sum().backward()
        grads.append([x.grad, *(f.grad for f in factors(layer))])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, nullcontext])
def test_inference(context: Callable[[], Any]) -> None:
    layer, x = made(), torch.randn(2, 4, INPUTS)
    before = x.clone()
    with context():
        result = layer(x)
    assert torch.equal(x, before)
    torch.testing.assert_close(result, mathematics(layer, x, *factors(layer)))


@pytest.mark.parametrize("one_operation", [True, False])
def test_copies_and_pickles_live_on_their_own(one_operation: bool) -> None:
    layer = made() if one_operation else through_modules(made())
    x = torch.randn(4, INPUTS)
    copied = copy.deepcopy(layer)
    if one_operation:
        torch.save(layer, file := io.BytesIO())
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    before = layer(x)
    with torch.no_grad():
        for factor in factors(copied):
            factor.zero_()
    assert torch.equal(layer(x), before)
    assert torch.equal(copied(x), layer.base_layer(x))


@contextmanager
def counted() -> Iterator[FlopCounterMode]:
    with FlopCounterMode(display=False) as counter:
        yield counter


def test_no_more_is_computed_than_there_is_to_compute() -> None:
    """With ``T`` tokens: the base's two products of three, and three small ones each way."""
    tokens, rank = 16, 3
    layer, x = made(), torch.randn(tokens, INPUTS, requires_grad=True)
    with counted() as counter:
        layer(x).sum().backward()
    base, small = 2 * tokens * INPUTS * OUTPUTS, 2 * tokens * rank * (INPUTS + OUTPUTS)
    assert counter.get_total_flops() == 2 * base + 3 * small


# Compiled


@pytest.mark.parametrize(
    "settings", [{}, {"lora_dropout": 0.4}, {"use_dora": True}, {"lora_bias": True}]
)
@pytest.mark.parametrize("kind", BASES)
def test_compiled_it_is_one_graph(kind: str, settings: dict[str, Any]) -> None:
    layer = made(kind, **settings).eval()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, INPUTS, requires_grad=True)
    expected = layer(x)
    torch.testing.assert_close(compiled(x), expected)
    wanted = torch.autograd.grad(expected.square().sum(), (x, *factors(layer)))
    got = torch.autograd.grad(compiled(x).square().sum(), (x, *factors(layer)))
    torch.testing.assert_close(got, wanted)


def test_an_optimizer_step_compiles_nothing_again() -> None:
    layer, counter = made(), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=counter)
    optimizer = torch.optim.SGD(factors(layer), lr=0.1)
    x = torch.randn(4, INPUTS)
    for _ in range(3):
        compiled(x).sum().backward()
        optimizer.step()
    assert counter.frame_count == 1


def test_compiled_several_adapters_are_one_graph() -> None:
    m = model()
    add_adapter(m, LoRA, LoRAParams(r=2, target_modules=["x"]), "other")
    set_adapter(m, ["default", "other"])
    torch._dynamo.reset()
    x = torch.randn(4, INPUTS)
    compiled = torch.compile(m["x"], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), m["x"](x))


def test_exported() -> None:
    layer, x = made().eval(), torch.randn(4, INPUTS)
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(x), layer(x))

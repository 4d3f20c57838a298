"""Rows of an embedding that are trained alone, and the output head that is tied to it."""

import copy
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

from core_plugin.adapters import (
    add_adapter,
    delete_adapter,
    disable_adapters,
    initialize,
    inject,
    load_adapter,
    merge,
    modules,
    per_sample,
    save_adapter,
    set_adapter,
    unload,
    unmerge,
)
from core_plugin.adapters.layer import Adapter, AdapterLayer
from core_plugin.adapters.names import base_name
from core_plugin.adapters.tokens import TokenRows
from core_plugin.errors import ConfigError
from core_plugin.training.materialize import Materializer
from core_plugin.types.peft import BasePeft, PeftParams


class Params(PeftParams):
    def __init__(self, rows: object) -> None:
        super().__init__(target_modules=[])
        object.__setattr__(self, "trainable_token_indices", rows)


class Rows(BasePeft):
    """Has no layers of its own."""

    prefix = "rows_"
    peft_type = "ROWS"

    @staticmethod
    def layers() -> dict[type, type[AdapterLayer]]:
        return {}

    @classmethod
    def config(cls, params: Params) -> dict[str, object]:
        return {"peft_type": "ROWS", "trainable_token_indices": params.trainable_token_indices}


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 9)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.tokens(tokens))))


TOKENS = torch.tensor([[0, 5, 2, 5], [8, 1, 5, 3]])
ROWS = [5, 2]


def model(tied: bool = True) -> Model:
    torch.manual_seed(0)
    return Model(tied)


def adapted(rows: object = ROWS, tied: bool = True) -> Model:
    return inject(model(tied), Rows, Params(rows), "x")


def trained(m: nn.Module) -> set[str]:
    return {name for name, p in m.named_parameters() if p.requires_grad}


def step(m: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        m(TOKENS).square().sum().backward()
        optimizer.step()


def reference(rows: list[int], tied: bool = True) -> Model:
    """A plain model of which these rows are trained, since no others get a gradient."""
    m = model(tied).requires_grad_(False)
    m.tokens.weight.requires_grad_(True)
    kept = torch.zeros(9, 1)
    kept[rows] = 1
    m.tokens.weight.register_hook(lambda grad: grad * kept)
    step(m)
    return m


# Training


@pytest.mark.parametrize("tied", [True, False])
def test_the_rows_are_trained_as_in_a_plain_model_and_nothing_else(tied: bool) -> None:
    m = adapted(tied=tied)
    assert trained(m) == {"tokens.token_adapter.trainable_tokens_delta.x"}
    assert torch.equal(m.tokens(TOKENS), model(tied).tokens(TOKENS))
    torch.testing.assert_close(m(TOKENS), model(tied)(TOKENS))
    step(m)
    expected = reference(ROWS, tied)
    torch.testing.assert_close(m(TOKENS), expected(TOKENS))
    torch.testing.assert_close(m.tokens.weight, expected.tokens.weight)
    delta = m.get_parameter("tokens.token_adapter.trainable_tokens_delta.x")
    torch.testing.assert_close(delta, expected.tokens.weight[ROWS])
    assert torch.equal(m.tokens.base_layer.weight, model(tied).tokens.weight)
    with disable_adapters(m):
        assert torch.equal(m(TOKENS), model(tied)(TOKENS))


def test_a_tied_head_shares_the_tensor() -> None:
    m = adapted()
    assert isinstance(m.head, TokenRows)
    names = dict(m.named_parameters(remove_duplicate=False))
    own, heads = (f"{at}.token_adapter.trainable_tokens_delta.x" for at in ("tokens", "head"))
    assert names[own] is names[heads]
    assert [own for _, own, _ in m.tokens.adapter_tensors("x")] == [
        "token_adapter.trainable_tokens_delta"
    ]
    assert not list(m.head.adapter_tensors("x"))
    assert not isinstance(adapted(tied=False).head, TokenRows)


def test_a_head_of_its_own_rows_is_trained_apart() -> None:
    m = adapted({"tokens": [5], "head": [1, 2]}, tied=False)
    assert trained(m) == {f"{a}.token_adapter.trainable_tokens_delta.x" for a in ("tokens", "head")}
    plain = model(tied=False)
    with torch.no_grad():
        m.head.token_adapter["trainable_tokens_delta"]["x"].fill_(0.5)
        plain.head.weight[[1, 2]] = 0.5
    torch.testing.assert_close(m(TOKENS), plain(TOKENS))


def test_a_head_that_reads_the_embeddings_weight_uses_the_rows() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(9, 4)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return F.linear(torch.tanh(self.tokens(tokens)), self.tokens.weight)

    torch.manual_seed(0)
    m = Functional()
    plain = copy.deepcopy(m)
    kept = torch.zeros(9, 1)
    kept[ROWS] = 1
    plain.tokens.weight.register_hook(lambda grad: grad * kept)
    inject(m, Rows, Params(ROWS), "x")
    step(m)
    step(plain)
    torch.testing.assert_close(m(TOKENS), plain(TOKENS))
    assert m.tokens.num_embeddings == 9


def layer(base: nn.Module, rows: list[int]) -> TokenRows:
    made = TokenRows(base)
    made.add(Adapter("x", Rows, None), rows)
    made.initialize("x")
    made.check("rows_")
    made.activate(["x"])
    return made


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_idx": 5},
        {"padding_idx": 0},
        {"padding_idx": 1},
        {"scale_grad_by_freq": True},
        {"padding_idx": 2, "scale_grad_by_freq": True},
        {"max_norm": 0.5},
        {"max_norm": 0.5, "norm_type": 1.0},
    ],
)
def test_the_embeddings_options_are_kept(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    base = nn.Embedding(9, 4, **options)
    plain = copy.deepcopy(base)
    rows = layer(base.requires_grad_(False), ROWS)
    delta = rows.token_adapter["trainable_tokens_delta"]["x"]
    with torch.no_grad():
        delta.mul_(2)
        plain.weight[ROWS] = delta
    out, expected = rows(TOKENS), plain(TOKENS)
    torch.testing.assert_close(out, expected)
    (out * torch.arange(4)).sum().backward()
    (expected * torch.arange(4)).sum().backward()
    torch.testing.assert_close(delta.grad, plain.weight.grad[ROWS])
    assert base.weight.grad is None


@pytest.mark.parametrize("scale", [2.0, torch.tensor(2.0)])
def test_a_scaled_embedding_scales_the_new_rows_too(scale: object) -> None:
    class Scaled(nn.Embedding):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) * self.embed_scale

    base = Scaled(9, 4)
    base.embed_scale = scale
    rows = layer(base, ROWS)
    torch.testing.assert_close(rows(TOKENS), base(TOKENS))
    with torch.no_grad():
        rows.token_adapter["trainable_tokens_delta"]["x"].fill_(1.0)
    assert rows(TOKENS)[0, 1].eq(2).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_precision_is_the_bases_outside_and_at_least_float32_inside(dtype: torch.dtype) -> None:
    m = inject(model().to(dtype), Rows, Params(ROWS), "x")
    delta = m.get_parameter("tokens.token_adapter.trainable_tokens_delta.x")
    assert delta.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    out = m(TOKENS)
    assert out.dtype == dtype
    torch.testing.assert_close(out, model().to(dtype)(TOKENS))
    out.sum().backward()
    assert delta.grad.dtype == delta.dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert m(TOKENS).dtype == model().to(dtype)(TOKENS).dtype


def test_gradients_of_frequent_tokens_are_summed_in_float32() -> None:
    rows = layer(nn.Embedding(2, 1, dtype=torch.bfloat16), [1])
    rows(torch.ones(4000, dtype=torch.int32)).sum().backward()
    assert rows.token_adapter["trainable_tokens_delta"]["x"].grad.item() == 4000


def test_the_first_call_may_be_in_inference_mode() -> None:
    m = adapted()
    with torch.inference_mode():
        m(TOKENS)
    step(m)
    torch.testing.assert_close(m(TOKENS), reference(ROWS)(TOKENS))


def test_a_compiled_model_gives_the_same() -> None:
    m = adapted()
    step(torch.compile(m, backend="eager", fullgraph=True))
    torch.testing.assert_close(m(TOKENS), reference(ROWS)(TOKENS))


# Several adapters


def several() -> Model:
    m = inject(model(), Rows, Params([5, 2]), "a")
    add_adapter(m, Rows, Params([8]), "b")
    add_adapter(m, Rows, Params([3, 2]), "c")
    with torch.no_grad():
        for value, name in enumerate("abc", start=1):
            m.tokens.token_adapter["trainable_tokens_delta"][name].fill_(value)
    return m


def test_adapters_with_different_rows_may_be_active_together() -> None:
    m, plain = several(), model()
    assert m.tokens(TOKENS)[0, 1].eq(1).all()
    set_adapter(m, ["b", "a"])
    with torch.no_grad():
        plain.tokens.weight[[5, 2]] = 1
        plain.tokens.weight[8] = 2
    torch.testing.assert_close(m(TOKENS), plain(TOKENS))
    assert trained(m) == {f"tokens.token_adapter.trainable_tokens_delta.{n}" for n in "ab"}
    merge(m)
    torch.testing.assert_close(m(TOKENS), plain(TOKENS))


def test_adapters_with_a_row_in_common_exclude_each_other() -> None:
    m = several()
    expected = m(TOKENS)
    with pytest.raises(ConfigError) as caught:
        set_adapter(m, ["a", "b", "c"])
    assert caught.value.faults == tuple(
        f"{path}: several of the adapters 'a', 'b', 'c' have the rows of the tokens [2]"
        for path in ("tokens", "head")
    )
    assert torch.equal(m(TOKENS), expected)


@torch.no_grad()
def test_every_sample_may_have_its_own_rows() -> None:
    m, names = several().eval(), ["c", "a"]
    with per_sample(m, names):
        together = m(TOKENS)
    for i, name in enumerate(names):
        set_adapter(m, name)
        torch.testing.assert_close(together[i], m(TOKENS)[i])


def test_deleting_one_leaves_the_others_and_then_the_model() -> None:
    m = several()
    set_adapter(m, ["a", "b"])
    delete_adapter(m, "a")
    plain = model()
    with torch.no_grad():
        plain.tokens.weight[8] = 2
    torch.testing.assert_close(m(TOKENS), plain(TOKENS))
    delete_adapter(m, "b")
    delete_adapter(m, "c")
    assert str(m) == str(model())
    assert m.head.weight is m.tokens.weight
    assert torch.equal(m(TOKENS), model()(TOKENS))


def test_copies_and_pickles_give_the_same_results() -> None:
    m = several()
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(other(TOKENS), m(TOKENS))
        deltas = (at.token_adapter["trainable_tokens_delta"] for at in (other.tokens, other.head))
        assert len({id(delta["a"]) for delta in deltas}) == 1


# Files and merging


def test_a_file_has_the_rows_once(tmp_path: Path) -> None:
    m = adapted()
    step(m)
    save_adapter(tmp_path, m, "x")
    file = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    assert list(file) == ["base_model.model.tokens.token_adapter.trainable_tokens_delta"]
    assert torch.equal(file.popitem()[1], m.tokens.weight[ROWS])
    other = adapted()
    load_adapter(other, tmp_path, "x")
    assert torch.equal(other(TOKENS), m(TOKENS))


def test_merged_rows_are_in_both_places_and_unmerged_in_none() -> None:
    m = adapted()
    step(m)
    expected = m(TOKENS)
    merge(m)
    torch.testing.assert_close(m(TOKENS), expected)
    with disable_adapters(m):
        assert torch.equal(m(TOKENS), model()(TOKENS))
    unmerge(m)
    assert torch.equal(m(TOKENS), expected)
    assert m.tokens.base_layer.weight is m.head.base_layer.weight
    unload(m)
    torch.testing.assert_close(m(TOKENS), expected)
    assert torch.equal(m.head.weight, m.tokens.weight)
    assert str(m) == str(model())


# From meta


def test_from_meta_the_rows_begin_as_the_embeddings() -> None:
    with torch.device("meta"):
        m = Model(tied=True)
    inject(m, Rows, Params(ROWS), "x")
    m.to_empty(device="cpu")
    m.head.base_layer.weight = m.tokens.base_layer.weight
    m.head.tie(m.tokens, "x")
    with torch.no_grad():
        for name, parameter in m.named_parameters():
            if "token_adapter" not in name:
                parameter.copy_(model().get_parameter(base_name(name)))
    initialize(m)
    assert torch.equal(m.tokens.weight, model().tokens.weight)
    torch.testing.assert_close(m(TOKENS), model()(TOKENS))


def test_materialized_rows_are_the_embeddings_and_stay_tied() -> None:
    with torch.device("meta"):
        m = Model(tied=True)
    inject(m, Rows, Params(ROWS), "x")
    fill = Materializer(m, torch.device("cpu"), 0, lambda part: part.reset_parameters(), base_name)
    fill(m.head)
    fill(m)
    deltas = [at.token_adapter["trainable_tokens_delta"]["x"] for at in (m.tokens, m.head)]
    assert deltas[0] is deltas[1]
    assert torch.equal(deltas[0], m.tokens.base_layer.weight[ROWS])
    assert m.tokens.base_layer.weight is m.head.base_layer.weight


# What has no rows


class Own(nn.Embedding):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + 1


@pytest.mark.parametrize(
    ("base", "rows", "message"),
    [
        (nn.Conv1d(1, 1, 1), [0], "a Conv1d has no rows of tokens"),
        (Own(3, 1), [0], "Own has a forward of its own"),
        (nn.Embedding(3, 1), [], "numbers from 0 to 2, got none"),
        (nn.Embedding(3, 1), [0, 3, -1], r"numbers from 0 to 2, got \[3, -1\]"),
        (nn.Embedding(3, 1), [0, True], r"numbers from 0 to 2, got \[True\]"),
        (nn.Embedding(3, 1), [1, 0, 1], r"the rows of the tokens \[1\] are there twice"),
    ],
)
def test_what_has_no_such_rows_is_refused(base: nn.Module, rows: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(TokenRows.fault(base, rows))


def test_a_refused_injection_changes_nothing() -> None:
    m = model()
    with pytest.raises(ConfigError, match="9"):
        inject(m, Rows, Params([9]), "x")
    assert str(m) == str(model())
    assert not list(modules(m))

"""One adapter for each sample of a batch, against the model called with one adapter at a time."""

import pytest
import torch
from torch import nn

from core_plugin.adapters import (
    add_adapter,
    disable_adapters,
    inject,
    merge,
    modules,
    per_sample,
    set_adapter,
)
from core_plugin.adapters.layer import AdapterLayer, AdapterParameters, ModelAdapter
from core_plugin.errors import ConfigError
from core_plugin.types.peft import BasePeft, PeftParams


class ScaleLayer(AdapterLayer):
    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.scale_vector = AdapterParameters(nn.init.normal_)

    def add_adapter(self, name: str, params: PeftParams) -> None:
        self.scale_vector.add(name, (1,), self.base_layer)

    def forward(self, *args: object, **kwargs: object) -> object:
        result = self.base_layer(*args, **kwargs)
        for name in self.used:
            if isinstance(result, tuple):
                result = (result[0] * self.scale_vector[name], *result[1:])
            else:
                result = result * self.scale_vector[name]
        return result

    def merge_into(self, tensors: dict[str, torch.Tensor], name: str) -> None:
        tensors["weight"].mul_(self.scale_vector[name])


class Attention(nn.Module):
    """Attention that takes a mask by name, and gives what it is given as well."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4, bias=False)

    def forward(
        self, x: torch.Tensor, *, mask: torch.Tensor, extra: tuple[torch.Tensor, str]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], None]:
        weights = (x @ x.mT + mask + extra[0]).softmax(-1)
        return self.out(weights @ x), {"weights": weights}, None


class Scale(BasePeft):
    """A number that multiplies a layer's first output."""

    prefix = "scale_"
    peft_type = "SCALE"

    @staticmethod
    def layers() -> dict[type, type[AdapterLayer]]:
        return dict.fromkeys((nn.Linear, nn.Embedding, Attention, nn.LayerNorm), ScaleLayer)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.attention = Attention()
        self.norm = nn.LayerNorm(4)
        self.score = nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x, found, nothing = self.attention(
            self.tokens(tokens), mask=mask, extra=(torch.zeros(5, 5), "as it is")
        )
        assert nothing is None
        return self.score(self.norm(x)) + found["weights"].sum()


NAMES = ["b", "__base__", "a", "b"]
TOKENS = torch.arange(20).reshape(4, 5) % 7


def masks() -> torch.Tensor:
    return torch.arange(100.0).reshape(4, 5, 5).sin()


def model() -> Model:
    torch.manual_seed(0)
    m = Model().eval()
    inject(m, Scale, PeftParams(["tokens", "attention", "out"], modules_to_save=["score"]), "a")
    add_adapter(m, Scale, PeftParams(["norm", "tokens"]), "b")
    with torch.no_grad():
        m.score.modules_to_save["a"].weight.add_(1)
    return m


def one_by_one(m: nn.Module, names: list[str]) -> torch.Tensor:
    parts = []
    for i, name in enumerate(names):
        set_adapter(m, [] if name == "__base__" else name)
        parts.append(m(TOKENS[i : i + 1], masks()[i : i + 1]) - 5)
    return torch.cat(parts)


@torch.no_grad()
@pytest.mark.parametrize("names", [NAMES, ["a"] * 4, ["__base__"] * 4, ["a", "b", "a", "b"]])
def test_every_sample_gets_its_own_adapter(names: list[str]) -> None:
    m = model()
    plain = m(TOKENS, masks())
    with per_sample(m, names):
        together = m(TOKENS, masks())
    # The attention weights of a row sum to 1, and there are 5 rows a sample.
    torch.testing.assert_close(together - 20, one_by_one(model(), names))
    assert torch.equal(m(TOKENS, masks()), plain)


def state(m: nn.Module) -> list[object]:
    return [(part.active, part.used, part.enabled, sorted(vars(part))) for _, part in modules(m)]


@torch.no_grad()
def test_an_exception_brings_everything_back() -> None:
    m = model()
    expected, before = m(TOKENS, masks()), state(m)

    def fail(rows: int) -> None:
        with per_sample(m, NAMES):
            m(TOKENS[:rows], masks()[:rows])
            raise RuntimeError("half-way")

    with pytest.raises(ConfigError, match=r"for 4 samples, and Embedding .*\[3, 5\]"):
        fail(3)
    assert state(m) == before
    with pytest.raises(RuntimeError, match="half-way"):
        fail(4)
    assert state(m) == before
    assert torch.equal(m(TOKENS, masks()), expected)


@torch.no_grad()
def test_others_can_be_named_for_a_while_inside() -> None:
    m = model()
    with per_sample(m, NAMES):
        expected = m(TOKENS, masks())
        with per_sample(m, ["a", "a", "b", "b"]):
            inner = m(TOKENS, masks())
        assert torch.equal(m(TOKENS, masks()), expected)
        with disable_adapters(m):
            base = m(TOKENS, masks())
        assert torch.equal(m(TOKENS, masks()), expected)
    torch.testing.assert_close(inner - 20, one_by_one(model(), ["a", "a", "b", "b"]))
    torch.testing.assert_close(base - 20, one_by_one(model(), ["__base__"] * 4))


@torch.no_grad()
def test_a_forward_of_the_instances_own_comes_back() -> None:
    m = model()
    layer, own = m.tokens, m.tokens.forward
    layer.forward = lambda tokens: own(tokens) + 1
    patched = layer.forward
    with per_sample(m, NAMES):
        assert layer.forward is not patched
        first = m.tokens(TOKENS)
    assert layer.forward is patched
    del layer.forward
    with per_sample(m, NAMES):
        torch.testing.assert_close(first, m.tokens(TOKENS) + 1)


def test_what_cannot_be_done_is_told_before() -> None:
    m = model()
    before = state(m)
    m.train()
    with pytest.raises(ConfigError, match="is in training mode"), per_sample(m, NAMES):
        pass
    with torch.no_grad(), per_sample(m, NAMES):
        m(TOKENS, masks())
    m.eval()
    with pytest.raises(ConfigError, match="no adapter called 'c'"), per_sample(m, ["a", "c"]):
        pass
    with pytest.raises(ConfigError, match="name one for each"), per_sample(m, []):
        pass
    assert state(m) == before


def test_merged_adapters_are_refused() -> None:
    m = nn.Sequential(nn.Linear(4, 4))
    inject(m, Scale, PeftParams(["0"]), "a")
    merge(m)
    with pytest.raises(ConfigError, match="unmerge them first"), per_sample(m, ["a"]):
        pass


class Shift(ModelAdapter):
    child = "door_shift"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.door_vector = AdapterParameters(nn.init.ones_)

    def add_adapter(self, name: str, params: object) -> None:
        self.door_vector[name] = nn.Parameter(torch.ones(1))

    def attach(self, model: nn.Module) -> None:
        model.register_forward_hook(lambda _, __, output: output + 100 * len(self.used))


class Door(BasePeft):
    """A number that is added to a model's outputs."""

    prefix = "door_"
    peft_type = "DOOR"
    mixes = True

    @staticmethod
    def model_adapter() -> type[ModelAdapter]:
        return Shift


class MixingScale(Scale):
    mixes = True


@torch.no_grad()
def test_what_cannot_tell_samples_apart_is_refused_if_it_is_wanted() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(x)

    m = Plain()
    inject(m, MixingScale, PeftParams(["out"]), "a")
    x = torch.randn(2, 4)
    expected = torch.cat([m(x[:1]), m.out.base_layer(x[1:])])
    add_adapter(m, Door, PeftParams(), "door")
    refused = pytest.raises(ConfigError, match="door_shift: Shift cannot tell samples apart")
    with refused, per_sample(m, ["a", "door"]):
        pass
    set_adapter(m, ["a", "door"])
    with per_sample(m, ["a", "__base__"]):
        torch.testing.assert_close(m(x), expected)
    torch.testing.assert_close(m(x), m.out(x) + 100)


@torch.no_grad()
def test_a_result_without_the_batch_is_told() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).sum(0)

    m = nn.Sequential(Summed())
    inject(m, Scale, PeftParams([], modules_to_save=["0"]), "a")
    refused = pytest.raises(ConfigError, match=r"Summed gives a tensor of shape \[4\]")
    with refused, per_sample(m, ["a", "__base__"]):
        m(torch.randn(2, 4))

"""A method in a whole model: what is replaced, frozen and shared, with memory and without."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn

from core_plugin.adapters import base_name, initialize, inject, modules
from core_plugin.adapters.layer import AdapterLayer
from core_plugin.testing.checks import assert_near, assert_same, snapshot
from core_plugin.testing.peft.models import Models, seeded
from core_plugin.testing.peft.networks import blocks, decoder
from core_plugin.types.peft import ADAPTER, BasePeft

pytestmark = pytest.mark.level(1)


@pytest.mark.only("layers")
def test_a_new_adapter_changes_nothing(models: Models) -> None:
    """A model with a new adapter gives the outputs that it gave without."""
    ids = models.ids()
    assert_near(models.adapted(fresh=True)(ids), models.network()(ids))


@pytest.mark.only("Linear")
def test_every_linear_layer_of_a_decoder(models: Models) -> None:
    """``all-linear`` is every projection of core's decoder, and not the head; nothing changes."""
    params, ids = dataclasses.replace(models.params, target_modules="all-linear"), models.ids()
    with seeded(0):
        model = decoder().eval()
        before = model(ids)
        inject(model, models.method, params)
    held = [path for path, _ in modules(model)]
    assert len(held) == 2 * 7
    assert all(path.startswith("model.layers.") for path in held), held
    assert_near(model(ids), before)


def test_the_outputs_are_of_the_models_shape(models: Models) -> None:
    """A model with an adapter gives outputs of the shape and dtype of its own."""
    for ids in (models.ids(), models.ids(1, 1)):
        actual, expected = models.adapted()(ids), models.network()(ids)
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype


def test_the_adapter_is_trained_and_nothing_else(models: Models) -> None:
    """What requires a gradient is the adapter's parameters, and they are all there is of it."""
    model = models.adapted(fresh=True)
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    held = {id(p) for _, m in modules(model) for _, _, p in m.adapter_parameters(ADAPTER)}
    assert trained
    assert trained == held
    of_model = {base_name(name) for name, p in model.named_parameters() if id(p) not in held}
    assert of_model == {name for name, _ in models.network().named_parameters()}


def test_the_models_parameters_stay_the_same_objects(models: Models) -> None:
    """Each parameter of the model is the object that it was, under a name that leads back."""
    model = models.network(tied=True)
    before = dict(model.named_parameters(remove_duplicate=False))
    models.adapted(model)
    now = {base_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    for name, parameter in before.items():
        assert now[name] is parameter, f"{name} is another parameter"


def test_the_same_seed_gives_the_same_adapter(models: Models) -> None:
    """Two injections after the same seed give the same values."""
    first, second = (snapshot(models.adapted(fresh=True)) for _ in range(2))
    for name, tensor in first.items():
        assert_same(second[name], tensor, name)


def test_names_begin_with_the_prefix(method: type[BasePeft], models: Models) -> None:
    """In the model the names of the adapter's parameters have the prefix and the adapter's name."""
    for name, parameter in models.adapted().named_parameters():
        if parameter.requires_grad:
            parts = name.split(".")
            assert any(part.startswith(method.prefix) for part in parts), name
            assert ADAPTER in parts, name


@pytest.mark.only("layers")
def test_shared_layers_stay_shared(models: Models) -> None:
    """A layer that stands in two places gets one adapter layer, in both."""
    model = models.adapted(models.network(shared=True))
    first, second = blocks(model)
    for name in ("up", "line", "experts"):
        assert getattr(first, name) is getattr(second, name), f"{name} came apart"


def test_tied_weights_stay_tied(models: Models) -> None:
    """An output layer that has the embedding's weight still has it."""
    model = models.network(tied=True)
    ids = models.ids()
    before = model(ids)
    models.adapted(model, fresh=True)
    weights = [
        parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if base_name(name).rpartition(".")[0].rpartition(".")[2]
        in ("embedding", "head", "embed_tokens", "lm_head")
        and not parameter.requires_grad
    ]
    assert len(weights) == 2
    assert weights[0] is weights[1]
    if models.changes_layers:
        assert_near(model(ids), before)


def test_hooks_of_the_model_go_on(models: Models) -> None:
    """Forward hooks of the model, its blocks and the layers that got an adapter still run."""
    model = models.network()
    calls: dict[str, int] = defaultdict(int)

    def count(name: str) -> None:
        calls[name] += 1

    inner = models.adapted()
    targets = {path for path, m in modules(inner) if isinstance(m, AdapterLayer)}
    hooked = {"": model, **{f"block {i}": b for i, b in enumerate(blocks(model))}}
    hooked |= {path: model.get_submodule(path) for path in targets}
    for name, module in hooked.items():
        module.register_forward_hook(lambda *_, name=name: count(name))
    models.adapted(model)(models.ids())
    missing = hooked.keys() - calls.keys()
    assert not missing, f"the hooks of {sorted(missing)} did not run"
    assert set(calls.values()) == {1}, dict(calls)


# On meta


def _on_meta(models: Models) -> nn.Module:
    with torch.device("meta"):
        model = models.network()
    return models.adapted(model, fresh=True)


def _from_meta(models: Models, seed: int) -> nn.Module:
    """Injected on meta, and then given memory, the model's values, and the adapter's."""
    model, values = _on_meta(models), snapshot(models.network())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.copy_(values.get(base_name(name), torch.tensor(torch.nan)))
    with seeded(seed):
        initialize(model)
    return model


def test_on_meta_nothing_is_drawn_or_made(models: Models) -> None:
    """On ``meta`` an injection makes no tensor elsewhere, and draws no random number."""
    with torch.device("meta"):
        model = models.network()
    state = torch.get_rng_state()
    inject(model, models.method, models.targeted)
    assert_same(torch.get_rng_state(), state, "the state of the random generator")
    real = [name for name, tensor in model.state_dict(keep_vars=True).items() if not tensor.is_meta]
    assert not real, f"{real} are not on meta"


def test_values_from_meta_are_distributed_as_made_at_once(models: Models) -> None:
    """An adapter made on ``meta`` and filled later has values as one that was made with memory."""
    later, at_once = _samples(models, from_meta=True), _samples(models, from_meta=False)
    assert later.keys() == at_once.keys()
    for name, expected in at_once.items():
        actual = later[name]
        assert actual.isfinite().all(), f"{name} was not filled"
        distance = (actual - expected).abs().mean()
        limit = (0.1 + 2 / len(expected) ** 0.5) * expected.std() + 1e-4 * expected.abs().max()
        assert distance <= limit, f"{name}: {distance:.3g} from the distribution, over {limit:.3g}"


def _samples(models: Models, from_meta: bool) -> dict[str, Tensor]:
    """The sorted values of each parameter of the adapter, of some injections together."""
    found = defaultdict(list)
    for seed in range(8):
        model = (
            _from_meta(models, 100 + seed) if from_meta else models.adapted(fresh=True, seed=seed)
        )
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                found[name].append(parameter.detach().flatten())
    return {name: torch.cat(values).sort().values for name, values in found.items()}


def test_a_model_from_meta_is_whole(models: Models) -> None:
    """A model from ``meta`` has no tensor left there, and its new adapter changes nothing."""
    model = _from_meta(models, 0)
    assert not [n for n, t in model.state_dict(keep_vars=True).items() if t.is_meta]
    ids = models.ids()
    assert model(ids).isfinite().all()
    if models.changes_layers:
        assert_near(model(ids), models.network()(ids))

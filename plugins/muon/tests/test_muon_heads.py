"""Which layers are taken for output heads, so that Muon leaves them."""

import pytest
import torch
from muon_routed import (
    HIDDEN,
    UNTAKEN,
    VOCABULARY,
    WIDTH,
    Block,
    LanguageModel,
    of_muon,
    reasons,
    with_hidden,
)
from torch import nn

# Heads


def test_heads_in_a_list_are_heads() -> None:
    model = LanguageModel()
    model.proj = nn.ModuleList([nn.Linear(WIDTH, VOCABULARY) for _ in range(2)])
    assert reasons(model)["proj.1.weight"] == "output head"


def test_a_head_within_a_block_is_told_by_the_vocabulary() -> None:
    """As of models that predict several tokens ahead."""
    model = LanguageModel()
    model.ahead = nn.ModuleList(
        [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)) for _ in range(2)]
    )
    assert of_muon(model) == [*HIDDEN, "ahead.0.0.weight", "ahead.1.0.weight"]


def test_a_classifier_is_a_head_as_no_layer_takes_what_it_gives() -> None:
    for name in ("fc", "classifier"):
        model = LanguageModel()
        del model.proj
        setattr(model, name, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)))
        found = reasons(model)
        assert found[f"{name}.0.weight"] == "hidden matrix"
        assert found[f"{name}.1.weight"] == UNTAKEN


def test_as_many_classes_as_an_image_has_colours_are_a_head() -> None:
    model = with_hidden(image=nn.Conv2d(3, WIDTH, 4), classes=nn.Linear(WIDTH, 3))
    assert reasons(model)["classes.weight"] == UNTAKEN


def test_a_head_as_wide_as_a_layer_is_guessed_by_its_name() -> None:
    for name in ("lm_head", "head", "output", "score", "classifier"):
        model = LanguageModel()
        del model.proj
        setattr(model, name, nn.Linear(WIDTH, WIDTH))
        setattr(model.embed_layers[0], name, nn.Linear(WIDTH, WIDTH))
        found = reasons(model)
        assert found[f"{name}.weight"] == "named like an output head (a guess)"
        within = f"embed_layers.0.{name}.weight"
        is_block_part = name in ("head", "output")
        assert found[within] == ("hidden matrix" if is_block_part else found[f"{name}.weight"])


def test_a_model_may_name_its_head_itself() -> None:
    class Declaring(LanguageModel):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(WIDTH, WIDTH)

        def get_output_embeddings(self) -> nn.Module:
            return self.proj

    class Silent(Declaring):
        def get_output_embeddings(self) -> nn.Module:
            raise NotImplementedError

    assert reasons(with_hidden(model=Declaring()))["model.proj.weight"] == "output head"
    assert reasons(Silent())["proj.weight"] == "hidden matrix"


def test_what_repeats_has_no_heads() -> None:
    """No layer takes 3 * WIDTH features, which the fused query, key and value have."""
    model = LanguageModel()
    for blocks in (nn.Sequential(Block(), Block()), nn.ModuleDict({"0": Block(), "1": Block()})):
        model.embed_layers = blocks
        assert of_muon(model) == HIDDEN
    model.embed_layers = nn.ModuleList([Block()])
    assert of_muon(model) == HIDDEN[:3]


class Grouped(Block):
    """Keys and values narrower than what the block takes, as of grouped queries."""

    def __init__(self, width: int, narrow: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, narrow, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


@pytest.mark.parametrize(("width", "narrow", "positions"), [(64, 32, 32), (4096, 1024, 1024)])
@pytest.mark.parametrize("vocabulary", [0, 50_000])
def test_keys_and_values_as_wide_as_an_embedding_is_long_are_hidden(
    width: int, narrow: int, positions: int, vocabulary: int
) -> None:
    with torch.device("meta"):
        blocks = nn.ModuleList([Grouped(width, narrow) for _ in range(2)])
        model = nn.ModuleDict({"positions": nn.Embedding(positions, width), "blocks": blocks})
        if vocabulary:
            model["tokens"] = nn.Embedding(vocabulary, width)
            model["ahead"] = nn.ModuleList([Ensemble(width, vocabulary)])
    found = reasons(model)
    assert found["blocks.1.attention.weight"] == "hidden matrix"
    assert found.get("ahead.0.head.weight", "output head") == "output head"


class Ensemble(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, classes)
        self.hidden = nn.Linear(width, width)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.last = nn.Linear(WIDTH, 6)


def test_the_last_matrix_of_what_repeats_is_a_head_if_no_layer_takes_its_outputs() -> None:
    """Ensembles, and an actor beside a critic of the same class."""
    pair = with_hidden()
    pair.actor, pair.critic = Net(), Net()
    for model in (nn.ModuleList([Net(), Net()]), nn.Sequential(Net(), Net()), pair):
        found = {name: reason for name, reason in reasons(model).items() if "last.weight" in name}
        assert set(found.values()) == {UNTAKEN}
        assert sum(name.endswith("first.weight") for name in of_muon(model)) == 2


def test_a_classifier_of_each_in_a_list_is_guessed_by_its_name() -> None:
    nets = nn.ModuleList([Net(), Net()])
    for net in nets:
        net.classifier, net.more = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
    assert reasons(nets)["1.classifier.weight"] == "named like an output head (a guess)"


def test_heads_of_several_layers_in_a_list_are_no_blocks() -> None:
    heads = [nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, c)) for c in (3, 5)]
    found = reasons(with_hidden(back=nn.Linear(32, WIDTH), heads=nn.ModuleList(heads)))
    assert found["heads.0.0.weight"] == "hidden matrix"
    assert found["heads.0.2.weight"] == found["heads.1.2.weight"] == UNTAKEN


def test_blocks_that_are_attributes_are_blocks() -> None:
    """Their fused query, key and value are no heads."""
    model = LanguageModel()
    model.layer0, model.layer1 = model.embed_layers
    del model.embed_layers
    assert set(of_muon(model)) == {name.replace("embed_layers.", "layer") for name in HIDDEN}


def test_a_layer_that_is_called_a_head_for_want_of_takers_is_a_guess() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, WIDTH)
            self.block = Block()

    assert reasons(Shared())["block.attention.weight"] == UNTAKEN


# Convolutions


def test_the_last_convolution_of_a_segmentation_is_a_head() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 21, 1)
    )
    assert of_muon(model) == ["0.weight", "2.weight"]
    assert reasons(model)["3.weight"] == UNTAKEN


def test_an_image_that_is_given_back_is_an_output() -> None:
    """That the first convolution takes as many channels says nothing."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3), nn.ConvTranspose2d(32, 16, 2))
    model.append(nn.ConvTranspose2d(16, 3, 2))
    assert of_muon(model) == ["0.weight", "1.weight", "2.weight"]
    assert reasons(model)["3.weight"] == UNTAKEN


def test_a_convolution_whose_channels_are_flattened_is_hidden() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5), nn.Flatten())
    model.extend([nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 10)])
    assert of_muon(model) == ["0.weight", "1.weight", "3.weight"]


def test_a_convolution_in_a_block_is_hidden() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grow, self.end = nn.Conv2d(16, 12, 1), nn.Conv2d(12, 16, 3)
            self.side = nn.Conv2d(16, 7, 1)
            self.back = nn.Conv2d(16, 16, 1)

    model = nn.Sequential(Growing(), Growing())
    assert "0.side.weight" in of_muon(model)

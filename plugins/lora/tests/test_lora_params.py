"""LoRA's parameters: ranges, defaults, and that reading them needs no torch."""

import math
import subprocess
import sys

import pytest

from core_plugin.errors import ConfigError
from core_plugin.types.peft import PeftPlugin
from core_plugin_lora.plugin import LoRA, LoRAParams


def test_the_entry_point_is_lora() -> None:
    assert PeftPlugin("lora").resolve() is LoRA
    assert PeftPlugin("lora").params_type() is LoRAParams


def test_importing_the_entry_point_does_not_import_torch() -> None:
    code = "import sys, core_plugin_lora.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_defaults() -> None:
    params = PeftPlugin.parse_params(None, LoRAParams)
    assert params == LoRAParams(
        target_modules=None,
        exclude_modules=None,
        r=8,
        lora_alpha=16,
        lora_dropout=0.0,
        use_rslora=False,
        use_dora=False,
        lora_bias=False,
        bias="none",
        init_lora_weights=True,
        rank_pattern={},
        alpha_pattern={},
        target_parameters=None,
        trainable_token_indices=None,
    )


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [
        ({}, 2.0),
        ({"r": 16, "lora_alpha": 4}, 0.25),
        ({"r": 16, "lora_alpha": 2.5, "use_rslora": True}, 0.625),
        ({"r": 2, "lora_alpha": 1, "use_rslora": True}, 1 / math.sqrt(2)),
    ],
)
def test_scaling(settings: dict[str, object], scaling: float) -> None:
    assert PeftPlugin.parse_params(settings, LoRAParams).scaling == pytest.approx(scaling)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 0}, "r is a rank, a whole number of at least 1, got 0"),
        ({"r": -1}, "at least 1, got -1"),
        ({"lora_alpha": 0}, "lora_alpha is a finite number above 0, got 0"),
        ({"lora_alpha": -1.5}, "above 0, got -1.5"),
        ({"lora_dropout": 1.0}, "lora_dropout is from 0 to below 1, got 1.0"),
        ({"lora_dropout": -0.1}, "below 1, got -0.1"),
        ({"target_modules": "("}, "is not a regular expression"),
        ({"rank": 8}, "peft.rank: is not a known parameter"),
        ({"r": 2.5}, "peft.r: "),
        ({"r": "8"}, "peft.r: "),
        ({"use_rslora": "yes"}, "peft.use_rslora: "),
        ({"bias": "some"}, "peft.bias: "),
        ({"init_lora_weights": "foo"}, "init_lora_weights is true, false, gaussian, orthogonal,"),
        ({"init_lora_weights": "pissa_niter_"}, "pissa_niter_<iterations>, got 'pissa_niter_'"),
        ({"init_lora_weights": "orthogonal", "r": 3}, "which needs even ranks; r is 3"),
        (
            {"init_lora_weights": "orthogonal", "rank_pattern": {"q": 5}},
            "which needs even ranks; rank_pattern: 'q' is 5",
        ),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: 'q_proj' is a rank, a whole number of"),
        ({"alpha_pattern": {"q_proj": 0}}, "alpha_pattern: 'q_proj' is a finite number above 0"),
        ({"rank_pattern": {"q_proj": 1.5}}, "peft.rank_pattern.q_proj: "),
        ({"lora_bias": True, "use_dora": True}, "lora_bias and use_dora do not go together"),
        (
            {"lora_bias": True, "init_lora_weights": "pissa"},
            "with lora_bias, init_lora_weights is true or false, got 'pissa'",
        ),
        ({"target_parameters": "experts.*"}, "peft.target_parameters: "),
        ({"trainable_token_indices": [3, -1]}, "numbers of tokens, from 0, got [3, -1]"),
        ({"trainable_token_indices": {"wte": [-2]}}, "numbers of tokens, from 0, got [-2]"),
    ],
)
def test_what_is_out_of_range_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PeftPlugin.parse_params(settings, LoRAParams)
    assert message in str(caught.value)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        PeftPlugin.parse_params({"r": 0, "lora_alpha": -1, "lora_dropout": 2.0}, LoRAParams)
    for field in ("r", "lora_alpha", "lora_dropout"):
        assert f"{field} is " in str(caught.value)


@pytest.mark.parametrize(
    "init",
    [True, False, "gaussian", "orthogonal", "eva", "olora", "pissa", "pissa_niter_16"],
)
def test_initializations(init: bool | str) -> None:
    params = PeftPlugin.parse_params({"init_lora_weights": init}, LoRAParams)
    assert params.init_lora_weights == init
    assert params.changes_base == (init in ("olora", "pissa", "pissa_niter_16"))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (True, "gaussian", True),
        ("eva", "orthogonal", True),
        (False, True, True),
        ("pissa", "pissa", True),
        ("pissa", True, False),
        ("gaussian", "olora", False),
        ("pissa", "pissa_niter_4", False),
    ],
)
def test_which_initializations_are_the_same_once_there_are_values(
    one: bool | str, other: bool | str, same: bool
) -> None:
    assert LoRA.same_result("init_lora_weights", one, other) == same
    assert LoRA.same_result("init_lora_weights", other, one) == same


def test_dropout_changes_no_result() -> None:
    assert LoRA.same_result("lora_dropout", 0.1, 0.0)
    assert not LoRA.same_result("lora_alpha", 8, 16)


@pytest.mark.parametrize("r", [2.5, True, "8"])
def test_a_rank_that_is_no_whole_number_is_refused_in_python_too(r: object) -> None:
    with pytest.raises(ValueError, match="whole number"):
        LoRAParams(r=r)


@pytest.mark.parametrize("alpha", [math.inf, math.nan])
def test_an_alpha_that_is_not_finite_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        LoRAParams(lora_alpha=alpha)

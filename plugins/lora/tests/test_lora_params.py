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
        target_modules="all-linear",
        exclude_modules=None,
        r=8,
        lora_alpha=16,
        lora_dropout=0.0,
        use_rslora=False,
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
    ],
)
def test_what_is_out_of_range_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PeftPlugin.parse_params(settings, LoRAParams)
    assert message in str(caught.value)


@pytest.mark.parametrize("r", [2.5, True, "8"])
def test_a_rank_that_is_no_whole_number_is_refused_in_python_too(r: object) -> None:
    with pytest.raises(ValueError, match="whole number"):
        LoRAParams(r=r)


@pytest.mark.parametrize("alpha", [math.inf, math.nan])
def test_an_alpha_that_is_not_finite_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        LoRAParams(lora_alpha=alpha)

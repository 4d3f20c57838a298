"""The PEFT methods of this repository pass the suite for their type."""

from __future__ import annotations

NOT_TRIED = "contract/the_types_that_are_tried: not tried: transformers.pytorch_utils.Conv1D"
GRADIENTS = "layers/gradients_are_those_of_finite_differences"
WITH_DORA = (
    "linear",
    "linear_without_bias",
    "linear_of_a_derived_type",
    "embedding",
    "conv1d",
    "conv1d_that_wraps_around",
    "conv2d",
    "conv3d",
)


def test_lora(report):
    found, told = report("peft:lora")
    assert found["level"] == 3
    assert set(found["results"]) == {"pass", "not for it"}
    assert NOT_TRIED in told


def test_lora_with_dora(report):
    """Its norm of the weights is a constant in backward, as its authors say."""
    reason = "the norm is a constant in backward"
    excepted = [f"--except={GRADIENTS}[{base}]={reason}" for base in WITH_DORA]
    found, told = report("peft:lora", "use_dora=true", *excepted)
    assert set(found["results"]) == {"pass", "not for it", "excepted"}
    assert "level reached: 3, with the exceptions above" in told


def test_ia3(report):
    found, told = report("peft:ia3")
    assert found["level"] == 3
    assert set(found["results"]) == {"pass", "not for it"}
    assert NOT_TRIED in told


def test_prompt_tuning(report):
    found, _ = report("peft:prompt_tuning")
    assert found["level"] == 3
    undeclared = {c["capability"] for c in found["cases"] if c["result"] == "not declared"}
    assert undeclared == {"per_sample"}

"""LoRA's settings beside those of the peft library."""

import dataclasses

import peft

from core_plugin_lora.plugin import LoRA, LoRAParams

OF_THE_FILE = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version"}
OF_THE_FILE |= {"peft_type", "revision"}
OURS = {field.name for field in dataclasses.fields(LoRAParams)}


def theirs() -> dict[str, object]:
    """Every setting that its files have, with the value that it has by itself."""
    return peft.LoraConfig().to_dict()


def test_every_setting_of_the_library_is_one_or_has_to_do_nothing() -> None:
    assert theirs().keys() - OURS - OF_THE_FILE == LoRA.neutral.keys()


def test_what_does_nothing_is_what_the_library_takes_by_itself() -> None:
    assert {key: theirs()[key] for key in LoRA.neutral} == LoRA.neutral


def test_what_a_file_without_a_setting_means_is_what_the_library_takes_by_itself() -> None:
    assumed = {**LoRA.config(LoRAParams()), **LoRA.file_defaults}
    assert {k: v for k, v in theirs().items() if k in assumed and k != "peft_type"} == {
        k: v for k, v in assumed.items() if k != "peft_type"
    }


def test_no_setting_is_ours_alone() -> None:
    assert OURS - theirs().keys() == {"weights"}

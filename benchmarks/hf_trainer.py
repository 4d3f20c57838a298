"""The peer of ``first_step.py``: Hugging Face's Trainer on a Llama of the same size."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from common import note_cpu
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class FirstStep(TrainerCallback):
    """Writes down the CPU seconds at the end of the first step."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_step_end(self, *_: object, **__: object) -> None:
        note_cpu(self.directory, int(os.environ["RANK"]))


def main(sizes: dict, directory: Path) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(sizes["vocabulary_size"], (64, sizes["sequence_length"]))
    config = LlamaConfig(
        vocab_size=sizes["vocabulary_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["heads"],
    )
    arguments = TrainingArguments(
        output_dir=str(directory / "output"),
        per_device_train_batch_size=sizes["micro_batch_size"],
        max_steps=1,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    Trainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=[{"input_ids": t, "labels": t} for t in tokens],
        callbacks=[FirstStep(directory)],
    ).train()
    torch.distributed.destroy_process_group()  # or gloo's threads may abort the process at its end


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))

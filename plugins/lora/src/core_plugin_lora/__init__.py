"""Low-rank adapters (LoRA) as a core-plugin PEFT method."""

__version__ = "0.1.0"

"""Prompt tuning, learned embeddings before the input's, as a core-plugin PEFT method."""

__version__ = "0.1.0"

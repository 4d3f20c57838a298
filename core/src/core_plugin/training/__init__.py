"""The training run: what happens between a checked configuration and the last checkpoint."""

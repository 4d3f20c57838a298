"""Fully sharded data parallelism (FSDP2) as a core-plugin strategy."""

__version__ = "0.1.0"

"""Somebody else's plugins: a strategy, an optimizer, a PEFT method and a hook."""

from collections import Counter

CALLS: Counter[str] = Counter()
"""How often each part was called in this process; the hook writes it down."""

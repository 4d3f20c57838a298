"""IA³, learned vectors that scale activations, as a core-plugin PEFT method."""

__version__ = "0.1.0"

"""The check of a parameter dataclass's ranges."""


def require(*rules: tuple[bool, str]) -> None:
    """Hold a dataclass to rules: pairs of what must be true and how to say it, with the value.

    Raises:
        ValueError: With the messages of all rules that do not hold.
    """
    broken = [message for holds, message in rules if not holds]
    if broken:
        raise ValueError("; ".join(broken))

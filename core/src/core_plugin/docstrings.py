"""What the docstrings of a dataclass say of its fields, for editors."""

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator


def of_fields(cls: type) -> dict[str, str]:
    """The description of each field that has one, on one line; a base's holds for what it adds.

    It stands under ``Attributes:`` in the docstring of the class, or in a string after the field.
    """
    found = (pair for base in reversed(cls.__mro__) for pair in (*_below(base), *_listed(base)))
    return {name: " ".join(text.split()) for name, text in found}


def _listed(cls: type) -> list[tuple[str, str]]:
    """The entries ``name: text`` under ``Attributes:``."""
    _, _, attributes = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")
    section = re.split(r"^\S", attributes, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^    (\w+).*?: (.*(?:\n {8,}.*)*)", section, re.MULTILINE)


def _below(cls: type) -> Iterator[tuple[str, str]]:
    """The strings that stand after fields."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # made without a file
        return
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    for field, after in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield field.target.id, text.value

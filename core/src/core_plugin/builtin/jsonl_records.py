"""The lines of the data source ``jsonl``: from JSON to stretches of text."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from core_plugin.builtin import tokenization
from core_plugin.errors import ConfigError
from core_plugin.params import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

SHOWN_FAULTS = 20
"""Wrong lines that a message lists; the rest are counted."""


@dataclasses.dataclass(frozen=True)
class Template:
    """What is put around the texts of a sample.

    A chat becomes, for each message, the mark of its role, its content, and ``end``; a prompt and
    its completion become both texts and ``end``. A trained tokenizer has each mark as one token; of
    another one's, a mark is whatever tokens it makes of it.

    Attributes:
        system: Stands before a system message.
        user: Stands before a user's message.
        assistant: Stands before an assistant's message.
        end: Stands after each message, and after a completion.
    """

    system: str = "<|system|>"
    user: str = "<|user|>"
    assistant: str = "<|assistant|>"
    end: str = "<|end|>"

    def __post_init__(self) -> None:
        require((bool(self.end), f"end must be a text, got {self.end!r}"))


class Part(NamedTuple):
    """A stretch of a sample."""

    text: str
    supervised: bool
    mark: bool
    """It comes from the template: a special token in it is one, which in content is plain text."""


def parse(path: str | list[str], template: Template) -> dict[str, list[Part]]:
    """The parts of each sample, by its place ``file:line``; blank lines are passed over.

    Raises:
        ConfigError: A file is missing or not UTF-8, or lines are wrong; with all of these.
    """
    samples, faults = {}, []
    for file in tokenization.files(path, (".jsonl",)):
        # not splitlines: JSON strings may hold the other characters that it takes for line ends
        for number, line in enumerate(tokenization.read(file).split("\n"), start=1):
            if line.strip():
                where = f"{file}:{number}"
                try:
                    samples[where] = list(_parts(json.loads(line), template))
                except json.JSONDecodeError as error:
                    faults.append(f"{where}: is no JSON: {error.msg} at column {error.colno}")
                except ValueError as error:
                    faults.append(f"{where}: {error}")
    report(faults)
    return samples


def report(faults: Iterable[str]) -> None:
    """Raise if there are faults.

    Raises:
        ConfigError: With the first ones, and the number of the others.
    """
    faults = iter(faults)
    shown = list(itertools.islice(faults, SHOWN_FAULTS))
    more = sum(1 for _ in faults)
    if shown:
        raise ConfigError("\n".join(shown) + (f"\nand {more} more" if more else ""))


def _parts(record: Any, template: Template) -> Iterator[Part]:
    """The parts of one record.

    Raises:
        ValueError: It is not one of the two forms.
    """
    if not isinstance(record, dict):
        raise ValueError(f"must be an object, got {_kind(record)}")
    if "messages" in record:
        if both := {"prompt", "completion"} & set(record):
            raise ValueError(f"has messages and {' and '.join(sorted(both))}; keep one form")
        yield from _chat(record["messages"], template)
        return
    if missing := {"prompt", "completion"} - set(record):
        raise ValueError(
            f"lacks {' and '.join(sorted(missing))}: an object needs messages, or prompt and "
            f"completion; it has {', '.join(record) or 'nothing'}"
        )
    yield Part(_string(record, "prompt"), supervised=False, mark=False)
    yield Part(_filled(record, "completion"), supervised=True, mark=False)
    yield Part(template.end, supervised=True, mark=True)


def _chat(messages: Any, template: Template) -> Iterator[Part]:
    if not isinstance(messages, list):
        raise ValueError(f"messages must be a list, got {_kind(messages)}")
    roles = [field.name for field in dataclasses.fields(template) if field.name != "end"]
    for n, message in enumerate(messages):
        path = f"messages.{n}"
        if not isinstance(message, dict):
            raise ValueError(f"{path} must be an object, got {_kind(message)}")
        role = _string(message, "role", path)
        if role not in roles:
            raise ValueError(f"{path}.role must be one of {', '.join(roles)}, got {role!r}")
        supervised = role == "assistant"
        content = (_filled if supervised else _string)(message, "content", path)
        yield Part(getattr(template, role), supervised=False, mark=True)
        yield Part(content, supervised, mark=False)
        yield Part(template.end, supervised, mark=True)
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("messages has no assistant message, which is what is learned")


def _string(record: Mapping[str, Any], key: str, path: str = "") -> str:
    where = f"{path}.{key}" if path else key
    if key not in record:
        raise ValueError(f"{where} is missing")
    value = record[key]
    if not isinstance(value, str):
        raise ValueError(f"{where} must be a string, got {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} holds half of a surrogate pair, which is no text") from None
    return value


def _filled(record: Mapping[str, Any], key: str, path: str = "") -> str:
    value = _string(record, key, path)
    if not value:
        raise ValueError(f"{path}.{key} is empty" if path else f"{key} is empty")
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null"}
    return names.get(type(value), f"{value!r}")

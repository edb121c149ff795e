"""The shapes in which examples are published: a line of JSON to messages, or to a text.

A line is one example::

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}      the same as a user's message and the assistant's
    {"text": "..."}                             all of which counts
"""

from __future__ import annotations

from json import JSONDecodeError
from typing import NamedTuple

from ..files.reading import parse_json
from ..wording import count

ROLES = ("system", "user", "assistant")
SPOKEN: dict[str, tuple[type, str]] = {
    "messages": (list, "a list of messages"),
    "prompt": (str, "a text"),
    "completion": (str, "a text"),
    "text": (str, "a text"),
}
"""The names that a line may have, with the type of each; others are reported, and not used."""
EXPECTED = "'messages', or 'prompt' and 'completion', or 'text'"


class Message(NamedTuple):
    """A message of a conversation.

    Attributes
    ----------
    role : one of `ROLES`.
    content : its text.
    counted : whether the loss covers it.
    """

    role: str
    content: str
    counted: bool


Said = list[Message] | str
"""An example: the messages of a conversation, or a text of which every token counts."""


def said_by(line: bytes) -> tuple[Said, list[str]]:
    """Return the messages of a line, or its text; and its names that are not used.

    Raises
    ------
    ValueError
        For a line that is no example.
    """
    try:
        table = parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        raise ValueError(f"{e}; expected a file in UTF-8") from e
    except JSONDecodeError as e:
        raise ValueError(
            f"it is no JSON ({e.msg} at character {e.colno}); expected an object with {EXPECTED}, on one line"
        ) from e
    except ValueError as e:
        raise ValueError(f"{e}; expected an object with {EXPECTED}") from e
    for name, (kind, words) in SPOKEN.items():
        if name in table and not isinstance(table[name], kind):
            raise ValueError(f"{name!r} is {repr(table[name])[:40]}; expected {words}")
    found = set(table) & set(SPOKEN)
    unused = sorted(set(table) - set(SPOKEN))
    if found == {"text"}:
        return table["text"], unused
    if found == {"prompt", "completion"}:
        return [Message("user", table["prompt"], False), Message("assistant", table["completion"], True)], unused
    if found != {"messages"}:
        names = ", ".join(map(repr, sorted(table))) or "nothing"
        raise ValueError(f"it has {names[:80]}; expected {EXPECTED}")
    said: list[Message] = []
    for n, message in enumerate(table["messages"], 1):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f"message {n} is {repr(message)[:60]}; expected a 'role' and a 'content' that is a text")
        if message.get("role") not in ROLES:
            raise ValueError(f"message {n} has the role {repr(message.get('role'))[:40]}; expected {', '.join(ROLES)}")
        unused += sorted(f"messages.{name}" for name in set(message) - {"role", "content"})
        said.append(Message(message["role"], message["content"], message["role"] == "assistant"))
    if "assistant" not in (message.role for message in said):
        raise ValueError(f"none of its {count(len(said), 'message')} is the assistant's, so nothing would count")
    return said, unused

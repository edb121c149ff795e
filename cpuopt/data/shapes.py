"""The shapes in which examples are published: a row of JSON or Parquet to messages, or to a text.

A row is one example. These are its shapes, and the names that are read::

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "...", "weight": 1}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}     ShareGPT
    {"instruction": "...", "input": "...", "output": "..."}                                     Alpaca
    {"prompt": "...", "completion": "..."}      or other names of `ASKED` and `ANSWERED`; of texts, or lists of messages
    {"text": "..."}                             all of which counts

A column that is null is absent. A name that would change what is learnt, and is not read, is an error; any other is
reported. A column that repeats what is read, such as ``prompt`` beside ``messages``, is not read.

Source: the documentation of OpenAI's fine-tuning, of TRL's datasets, and of LLaMA-Factory, whose line between
instruction and input this has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError, optional
from ..files.reading import LARGEST, WORDS, next_json, open_file
from ..wording import count, one_line
from .stored import File, tokens_of

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot"), "assistant"),
}
CHATS = ("messages", "conversations", "conversation")
"""The names of a list of messages."""
ASKED = ("prompt", "instruction", "question", "query")
MORE = ("input", "context")
"""What is appended to the text that is asked; or ``input`` alone is asked."""
ANSWERED = ("completion", "response", "output", "answer")
SYSTEM = ("system", "system_prompt")
EXPECTED = "'messages', 'conversations', 'prompt' with 'completion', 'instruction' with 'output', or 'text'"
COUNTS = ("weight", "train", "training", "train_on_turn", "learn", "loss")
"""Names in a message by which it is left out of the loss: 0 or false."""
MESSAGE = ("role", "content")
READ = {*MESSAGE, "from", "value", *COUNTS}
"""The names that are read of a message."""
TOOLS, MEDIA = "tool calls are not trained", "only text is trained"
UNWEIGHTED = "an example has no weight of its own"
WHY = {
    "row": {
        **dict.fromkeys(("tools", "functions", "function_call", "tool_calls"), TOOLS),
        **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), MEDIA),
        **dict.fromkeys(("weight", "weights", "sample_weight", "loss_weight", "mask", "assistant_masks"), UNWEIGHTED),
        **dict.fromkeys(("history",), "earlier turns are read from 'messages'"),
        **dict.fromkeys(("chat_template_kwargs", "documents"), "a template is given messages alone"),
    },
    "message": {
        **dict.fromkeys(("tool_calls", "function_call", "tool_call_id"), TOOLS),
        **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), MEDIA),
        **dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "only its content is trained"),
        **dict.fromkeys(("refusal", "prefix"), "only its content is trained"),
        **dict.fromkeys(("weights", "loss_weight", "mask", "masked", "train_detail"), "a message has 'weight', 0 or 1"),
    },
}
"""Names that change what is learnt and are not read, with the reason, in a row and in a message."""
TOOL_ROLES = ("tool", "function", "function_call", "observation", "ipython", "tool_call", "tool_response")
PARQUET = b"PAR1"
"""The first bytes of Parquet."""
NOT_BLANK = re.compile(r"[^\ufeff \t\r\n]|\Z")


class Message(NamedTuple):
    """A message of a conversation.

    Attributes
    ----------
    role : ``system``, ``user`` or ``assistant``.
    content : its text.
    counted : whether the loss covers it.
    """

    role: str
    content: str
    counted: bool


Said = list[Message] | str
"""An example: the messages of a conversation, or a text of which every token counts."""


class RowContent(NamedTuple):
    """What a row says.

    Attributes
    ----------
    said : messages, or a text.
    used : the names that were read.
    unused : the others, which change nothing.
    """

    said: Said
    used: tuple[str, ...]
    unused: tuple[str, ...]


class FileRow(NamedTuple):
    """A row of a file.

    Attributes
    ----------
    where : file and line.
    content : its bytes in the file, by which it is held out or not.
    value : reads it; `ValueError` if it is no JSON.
    """

    where: str
    content: bytes
    value: Callable[[], Any]


# What a row says


def example_of(row: Any) -> RowContent:
    """Return what a row says: of `CHATS`, of two names for question and answer, or of ``text``, the first that it has.

    Raises
    ------
    ValueError
        If it is no example, changes by a name that is not read what is learnt, or has two examples.
    """
    row = {"messages": row} if isinstance(row, list) else row
    if not isinstance(row, dict):
        raise ValueError(f"it is {WORDS[type(row)]}; expected an object with {EXPECTED}")
    table = {name: x for name, x in row.items() if x is not None}
    _require_read(table, "row", "it")
    if not (found := _found(table)):
        raise ValueError(f"it has {', '.join(map(repr, sorted(table)))[:80] or 'nothing'}; expected {EXPECTED}")
    used, said = found[0]
    words = ", ".join
    for names, other in found[1:]:
        if not _repeats(other, said):
            raise ValueError(f"its {words(used)} and its {words(names)} are two examples; leave one of them out")
    unused = {name for name in table if name not in used}
    for content in [said] if isinstance(said, str) else [m.content for m in said]:
        if not content.isascii() and any("\ud800" <= c <= "\udfff" for c in content):
            raise ValueError("it has half of a surrogate pair, as in '\\ud800', which is no text")
    if isinstance(said, str):
        if not said.strip():
            raise ValueError("it is empty; expected a text")
        return RowContent(said, used, tuple(sorted(unused)))
    if table.get("label") is False:
        raise ValueError("its 'label' is false, so the answer is not wanted; leave it out")
    if not any(message.counted for message in said):
        none = "is the assistant's" if "assistant" not in (m.role for m in said) else "has a weight of 1"
        raise ValueError(f"none of its {count(len(said), 'message')} {none}, so nothing would count")
    for n, message in enumerate(said, 1):
        if message.counted and not message.content.strip():
            raise ValueError(f"message {n}, an answer, is empty: the model would learn to say nothing")
    for name in used:
        messages = table[name] if isinstance(table[name], list) else ()
        unused |= {f"{name}.{n}" for m in messages for n, x in m.items() if x is not None and n not in READ}
    return RowContent(said, used, tuple(sorted(unused)))


def _found(table: dict[str, Any]) -> list[tuple[tuple[str, ...], Said]]:
    """Return the examples of a row, each with the names that it is read from: chats, pairs, then a text."""
    found: list[tuple[tuple[str, ...], Said]] = []
    system = {name: _turns(table, name, "system") for name in SYSTEM if table.get(name)}
    conversations: list[tuple[tuple[str, ...], list[Message]]]
    conversations = [((name,), _turns(table, name)) for name in CHATS if name in table]
    for answered in (name for name in ANSWERED if name in table):
        for asked in [name for name in ASKED if name in table] or [name for name in MORE[:1] if name in table]:
            more = [name for name in MORE if name != asked and isinstance(table.get(name), str)]
            if asked != "input" and not isinstance(table.get("input", ""), str):
                raise ValueError(f"'input' is {repr(table['input'])[:40]}; expected a text")
            question = [m._replace(counted=False) for m in _turns(table, asked, "user")]
            if more and isinstance(table[asked], str):
                texts = filter(str.strip, (table[name] for name in (asked, *more)))
                question = [Message("user", "\n".join(texts), False)]
            conversations.append(((asked, *more, answered), question + _turns(table, answered, "assistant")))
    for names, messages in conversations:
        for name, turn in system.items():
            if messages[:1] != turn:
                if messages and messages[0].role == "system":
                    raise ValueError(f"its {name!r} and its first message are two; leave one of them out")
                names, messages = (name, *names), turn + messages
        found.append((names, messages))
    if "text" in table and (table["text"] or not found):
        if not isinstance(table["text"], str):
            raise ValueError(f"'text' is {repr(table['text'])[:40]}; expected a text")
        found.append((("text",), table["text"]))
    return found


def _turns(table: dict[str, Any], name: str, role: str = "") -> list[Message]:
    """Return the messages of a list, or the one of a role that a text is."""
    x = table[name]
    if role and isinstance(x, str):
        return [Message(role, x, role == "assistant")]
    if not isinstance(x, list):
        words = "a text or a list of messages" if role else "a list of messages"
        raise ValueError(f"{name!r} is {repr(x)[:40]}; expected {words}")
    return [_message(message, f"message {n}") for n, message in enumerate(x, 1)]


def _message(x: Any, where: str) -> Message:
    """Return a message of OpenAI's names, or of ShareGPT's."""
    table = {name: v for name, v in x.items() if v is not None} if isinstance(x, dict) else {}
    _require_read(table, "message", where)
    for name, other in ("role", "from"), ("content", "value"):
        if name in table and other in table and table[name] != table[other]:
            raise ValueError(f"{where} has {name!r} and {other!r}, which differ; leave one of them out")
    role, content = table.get("role", table.get("from")), table.get("content", table.get("value"))
    if isinstance(role, str) and role in TOOL_ROLES:
        raise ValueError(f"{where} has the role {role!r}: {TOOLS}")
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"{where} has a part of the type {repr(kind)[:40]}; expected 'text' with a text")
        if name := next((name for name in COUNTS if part.get(name) is not None), ""):
            raise ValueError(f"{where} has a part with {name!r}; expected it in the message, or not at all")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{where} is {repr(x)[:60]}; expected a 'role' and a 'content' that is a text")
    if not isinstance(role, str) or role not in ROLES:
        expected = "system, user, assistant"
        raise ValueError(f"{where} has the role {repr(role)[:40]}; expected {expected}")
    counted = ROLES[role] == "assistant"
    for name in COUNTS:
        if (weight := table.get(name, counted)) not in (0, 1) or weight > counted:
            expected = "0 or 1" if counted else "0: answers alone count"
            raise ValueError(f"{where} has the {name} {repr(weight)[:40]}; expected {expected}")
        counted = counted and bool(weight)
    return Message(ROLES[role], content, counted)


def _require_read(table: dict[str, Any], what: str, where: str) -> None:
    """Refuse a name that changes what is learnt and is not read; one whose value is empty says nothing."""
    for name, why in WHY[what].items():
        if table.get(name) not in (None, "", "[]", [], {}) and (name, table[name]) != ("weight", 1):
            raise ValueError(f"{where} has {name!r}, which is not read: {why}")


def _repeats(other: Said, said: Said) -> bool:
    """Return whether an example of a row repeats another: a text has its answers, or it has those of messages."""
    if isinstance(other, str):
        return all(m.content.strip() in other for m in said if isinstance(m, Message) and m.counted)
    spoken = "\n".join(m.content for m in said if isinstance(m, Message))
    return all(m.content.strip() in spoken for m in other if m.counted)


# The rows of a file


def rows_of(file: File) -> Iterator[FileRow]:
    """Yield the rows of a file: of JSON, one in each line, or objects of several lines, or one list; or of Parquet.

    Raises
    ------
    UserError
        If its rows cannot be told apart.
    """
    content = tokens_of(file, np.dtype(np.uint8))[:].tobytes()
    path = repr(str(file.path))
    if content.startswith(PARQUET):
        yield from _of_parquet(path, content)
        return
    lines = content.split(b"\n")
    first = next((line for line in lines if line.strip()), b"").removeprefix("\ufeff".encode()).strip()
    more = len(first) < len(content.strip())
    if not (more and _is_json(first)) and (text := _in_parts(content, first)) is not None:
        yield from _of_values(path, text)
        return
    for n, line in enumerate(lines, 1):
        if line.strip():
            yield FileRow(f"{path}, line {n}", line, partial(_of_line, line))


def _is_json(line: bytes) -> bool:
    try:
        _of_line(line)
    except ValueError:
        return False
    return True


def _in_parts(content: bytes, first: bytes) -> str | None:
    """Return the text of a file whose first value is a list, or an object of several lines; None for any other."""
    try:
        text = content.decode("utf-8-sig")
        if not first.startswith(b"["):
            next_json(text, len(text) - len(text.lstrip()))
    except ValueError:
        return None
    return text


def _of_line(line: bytes) -> Any:
    """Return the value of a line.

    Raises
    ------
    ValueError
        If it is no JSON.
    """
    try:
        text = line.decode("utf-8-sig").strip()
        value, end = next_json(text)
    except UnicodeDecodeError as e:
        raise ValueError(f"{e}; expected a file in UTF-8") from e
    except json.JSONDecodeError as e:
        raise ValueError(
            f"it is no JSON ({e.msg} at character {e.colno}); expected an object with {EXPECTED}, on one line"
        ) from e
    except ValueError as e:
        raise ValueError(f"{e}; expected an object with {EXPECTED}") from e
    if end < len(text):
        raise ValueError(f"it has more than one value: {text[end:].strip()[:20]!r}; expected one on each line")
    return value


def _of_values(path: str, text: str) -> Iterator[FileRow]:
    """Yield the elements of a list, or objects one after the other."""
    at = line_at = 0
    line, inside = 1, False

    def skip_to(to: int) -> str:
        """Go on to the next character that is not blank; return it."""
        nonlocal at, line, line_at
        at = _behind_blank(text, to)
        line += text.count("\n", line_at, at)
        line_at = at
        return text[at : at + 1]

    if skip_to(0) == "[":
        inside = True
        skip_to(at + 1)
    while at < len(text) and not (inside and text[at] == "]"):
        try:
            value, end = next_json(text, at)
        except json.JSONDecodeError as e:
            place = f"{path}, line {e.lineno}"
            raise UserError(f"{place}: it is no JSON ({e.msg} at character {e.colno}); was the file cut short?") from e
        except ValueError as e:
            raise UserError(f"{path}, line {line}: {e}") from e
        yield FileRow(f"{path}, line {line}", text[at:end].encode(), partial(_given, value))
        if skip_to(end) == "," and inside:
            skip_to(at + 1)
        elif inside and at < len(text) and text[at] != "]":
            raise UserError(f"{path}, line {line}: {text[at : at + 20]!r} follows an example; expected ',' or ']'")
    if inside and at == len(text):
        raise UserError(f"{path}, line {line}: the list has no ']'; was the file cut short?")
    if inside and skip_to(at + 1):
        raise UserError(f"{path}, line {line}: {text[at : at + 20]!r} follows the list; expected its end")


def _behind_blank(text: str, at: int) -> int:
    found = NOT_BLANK.search(text, at)
    return found.start() if found else len(text)


def _given(value: Any) -> Any:
    return value


def _of_parquet(path: str, content: bytes) -> Iterator[FileRow]:
    pyarrow = optional("pyarrow", f"{path}, which is Parquet,", "parquet")
    n = 0
    try:
        for batch in import_module("pyarrow.parquet").ParquetFile(pyarrow.BufferReader(content)).iter_batches():
            for row in batch.to_pylist():
                n += 1
                text = json.dumps(row, ensure_ascii=False, default=str)
                yield FileRow(f"{path}, row {n}", text.encode(errors="surrogatepass"), partial(_given, row))
    except (pyarrow.ArrowException, OSError) as e:
        raise UserError(f"cannot read {path}: {one_line(str(e))[:200]}") from e


# What a file is


def holds_examples(path: Path) -> bool | None:
    """Return whether a file holds examples: by its content, unless its name ends in ``.txt`` or ``.bin``.

    Returns
    -------
    None for a ``.json`` that begins with no example: it is text beside texts, and else refused.
    """
    suffix = path.suffix.lower()
    if suffix in (".txt", ".bin"):
        return False
    if suffix in (".jsonl", ".ndjson", ".parquet") or begins_with_example(path):
        return True
    return None if suffix == ".json" else False


def begins_with_example(path: Path) -> bool:
    """Return whether a file is Parquet, or begins with a row of JSON in one of the shapes."""
    for size in (1 << 16, LARGEST):
        try:
            with open_file(path) as file:
                head = file.read(size)
        except OSError:
            return False  # whoever reads it says so
        if head.startswith(PARQUET):
            return True
        text = head.decode(errors="ignore")
        start = _behind_blank(text, 0)
        if text[start : start + 1] == "[":
            start = _behind_blank(text, start + 1)
        if text[start : start + 1] != "{":
            return False
        try:
            value, _ = next_json(text, start)
        except json.JSONDecodeError:
            continue  # it may be longer
        except ValueError:
            return False
        try:
            return bool(_found({name: x for name, x in value.items() if x is not None})) or {*value} >= {*MESSAGE}
        except ValueError:
            return True  # an example with a fault, which its reader names
    return False

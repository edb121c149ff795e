"""Chats as tokens by the chat template in a model's files, as ``transformers`` makes them.

A template is rendered in a process of its own (`isolate.jinja`). Its text is tokenized whole, and special tokens that a
template writes are those tokens. What a message says stays text: where it has a special token's text, it is put between
two characters that no text has, by which it is found again in what was rendered.

Which tokens an assistant writes follows from renderings alone: an answer begins where the prompt for it ends, and ends
where the chat up to it ends.
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..files.gguf import Gguf, is_gguf
from ..isolate.process import Side, Worker
from ..wording import count
from . import companions, ggml
from .forms import TurnEncoder, format_of
from .shapes import Message
from .tokenizers import Json, Tokenizer

OLDEST = (3, 1, 6)
"""The first Jinja without a known way out of its sandbox."""
INSTALL = "pip install 'cpuopt[hf]' (in a clone: pip install -e '.[hf]')"
START_S, LIMIT_S, EACH_S = 60.0, 10.0, 0.05
"""Seconds to start; to compile a template or render a chat; and to render each of many, on average."""
LARGEST = 1 << 20
"""Characters of a template; the longest known has under 50,000."""
OPEN, SHUT = "\ufdd0", "\ufdd1"
"""Around a special token's text in a message: characters that Unicode keeps for the use inside a program."""
MARKED = re.compile(f"{OPEN}([^{OPEN}{SHUT}]+|{OPEN}|{SHUT}){SHUT}|[{OPEN}{SHUT}]")
Rendered = tuple[int, str]
"""A text: the number of characters with which it begins as another one does, and what follows them."""


@dataclass(frozen=True)
class Source:
    """A chat template as a model's files have it.

    Attributes
    ----------
    where : the file or the directory.
    special : the texts of special tokens by their names in templates, such as ``bos_token``.
    """

    text: str
    where: str
    special: Mapping[str, str]


def source_of(tokenizer: Tokenizer, adapters: Sequence[Path] = ()) -> Source | None:
    """Return the chat template of a model, or of the last adapter that has one; None if there is none.

    Raises
    ------
    UserError
        For a file that is no template, and for named templates of which none is ``default``.
    """
    if not isinstance(tokenizer, Json):
        return None
    path = Path(tokenizer.path)
    base = ggml.files(Gguf(path)) if is_gguf(path) else companions.beside(path)
    special = companions.special_texts(path.parent, base)
    places = [(adapter, companions.beside(adapter / companions.CONFIG)) for adapter in reversed(adapters)]
    for folder, files in [*places, (path.parent, base)]:
        if not (named := companions.chat_templates(folder, files)):
            continue
        where = tokenizer.path if files is base else str(folder)
        if "default" not in named:
            names = ", ".join(map(repr, sorted(named)))[:200]
            raise UserError(f"{where!r} has chat templates {names}; expected one of them to be called 'default'")
        if len(named["default"]) > LARGEST:
            raise UserError(
                f"the chat template of {where!r} has {len(named['default']):,} characters; expected {LARGEST:,} at most"
            )
        return Source(named["default"], where, special | companions.special_texts(folder, files))
    return None


def encoder_of(
    tokenizer: Tokenizer, asked: str | None = None, flag: str = "--chat", adapters: Sequence[Path] = ()
) -> TurnEncoder | Template:
    """Return what turns chats into tokens: the form that was asked for, else the model's template, else a known form.

    Parameters
    ----------
    asked : the name of a form.
    flag : what needs it, for the message.
    adapters : directories of adapters, which may have a template of their own.

    Raises
    ------
    UserError
        If there is none, or the template cannot be rendered.
    """
    source = None if asked else source_of(tokenizer, adapters)
    if source is None:
        return TurnEncoder(tokenizer, format_of(tokenizer, asked, flag))
    assert isinstance(tokenizer, Json)
    _require_jinja(source.where)
    return Template(tokenizer, source)


def _require_jinja(where: str) -> None:
    """Raise a `UserError` if Jinja is missing, or too old."""
    try:
        if tuple(map(int, re.findall(r"\d+", metadata.version("jinja2"))[:3])) >= OLDEST:
            return
    except metadata.PackageNotFoundError:
        pass
    raise UserError(
        f"the chat template of {where!r} needs the library jinja2, 3.1.6 or later; {INSTALL}, or name a form with "
        "--chat-format"
    )


def _any_of(texts: Sequence[str]) -> str:
    """Return the pattern of any of some texts, the longest first; by their beginnings, since there may be thousands."""
    rests: dict[str, list[str]] = {}
    for text in sorted(texts, key=len, reverse=True):
        rests.setdefault(text[:2], []).append(re.escape(text[2:]))
    return "|".join(f"{re.escape(two)}(?:{'|'.join(rest)})" for two, rest in rests.items()) or "(?!)"


class Template:
    """Chats as ids, by a chat template.

    Attributes
    ----------
    rewritten : the examples so far whose earlier answers the template writes otherwise once another turn follows.
    """

    def __init__(self, tokenizer: Json, source: Source) -> None:
        self.tokenizer, self.source, self.rewritten = tokenizer, source, 0
        added = tokenizer.encoding.get_added_tokens_decoder().values()
        alternatives = _any_of([t.content for t in added if t.special and t.content])
        self._special = re.compile(f"(?<!{OPEN})(?:{alternatives})")
        self._foreign = re.compile(f"{alternatives}|{OPEN}|{SHUT}")
        self._newline = tokenizer.encode("\n")
        self._left = LIMIT_S
        self._worker: Worker | None = None

    @property
    def notes(self) -> list[str]:
        """What is to be known of the examples so far, in sentences."""
        if not self.rewritten:
            return []
        n = count(self.rewritten, "example")
        return [f"only the last answer of {n} counts, because the chat template rewrites earlier ones"]

    @cached_property
    def ends(self) -> set[int]:
        """The ids that end a reply: the end of the model's texts, and what the template writes behind an answer."""
        texts = [self.source.special.get("eos_token", "")]
        try:
            chat = [Message("user", "a", False), Message("assistant", "a", True)]
            (_, text), before = self._rendered(chat, [(0, 2, False), (0, 1, True)])
            if (span := self._answer(text, before, (len(text), ""), "a")) is not None:
                texts += [m[0] for m in self._special.finditer(text, *span)][-1:]
        except UserError:  # which a chat will report
            pass
        return {i for text in texts if text and (i := self.tokenizer.id_of(text)) is not None}

    def begun(self, system: str) -> list[int]:
        """Return the ids before the first turn: the template puts them there with the first."""
        return []

    def closing(self) -> list[int]:
        """Return the ids behind a reply: the same."""
        return []

    def asked(self, before: Sequence[int], chat: Sequence[tuple[str, str]]) -> list[int]:
        """Return the ids of a chat up to the reply that a model writes; those of earlier turns may be others."""
        return self._encoded(self.render([Message(role, text, False) for role, text in chat], True))[0]

    def example(self, chat: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Return the ids of a chat, and which of them count.

        Raises
        ------
        UserError
            If the template refuses the chat, or writes its last answer otherwise than where it asks for one.
        """
        answers = [n for n, (role, _, counted) in enumerate(chat) if role == "assistant" and counted]
        stretches = [stretch for n in answers for stretch in ((0, n, True), (0, n + 1, False), (0, n or 1, False))]
        other = Message("assistant", "b" if chat[0].content.strip().startswith("a") else "a", False)
        if answers[:1] == [0]:  # nothing asks for it, so it begins where it differs from another one
            stretches[0] = (len(chat), len(chat) + 1, False)
        (_, whole), *found = self._rendered([*chat, other], [(0, len(chat), False), *stretches])
        if answers[:1] == [0]:
            found[0] = (found[0][0], "")
        parts = zip(answers, found[::3], found[1::3], found[2::3], strict=True)
        spans = [
            self._answer(whole, before, upto, chat[n].content) if not n or before[0] >= asked[0] else None
            for n, before, upto, asked in parts  # a prompt has all that was said before
        ]
        if answers and spans[-1] is None and answers[-1] + 1 < len(chat):  # what follows the last answer changes it
            return self.example(chat[: answers[-1] + 1])
        if answers and spans[-1] is None:
            raise UserError(
                f"the chat template of {self.source.where!r} writes message {answers[-1] + 1} otherwise than where it "
                "asks for one, so a model cannot learn it; take --chat-format, or another template"
            )
        if None in spans:
            self.rewritten += 1
            spans = spans[-1:]
        ids, behind = self._encoded(whole)
        ends = np.maximum.accumulate(np.array(behind, np.int64))
        starts = np.concatenate([[0], ends])[:-1]
        counted = np.zeros(len(ids), np.bool_)
        for lo, hi in filter(None, spans):
            counted |= (starts < hi) & (lo < ends)
        # A token without a character of its own is one of several of a character, or put there: as the one before.
        before = np.maximum.accumulate(np.where(ends > starts, np.arange(len(ids)), 0))
        return ids, counted[before].tolist()

    def _answer(self, whole: str, before: Rendered, upto: Rendered, content: str) -> tuple[int, int] | None:
        """Return where an answer lies in the text of a chat; None if it is not what its prompt asks for.

        Parameters
        ----------
        before : the rendered prompt for it.
        upto : the rendered chat that ends with it; a token behind its end may differ.
        content : what was said. A special token right behind it ends the answer.
        """
        (start, other), (end, behind) = before, upto
        if other or start > end:
            return None
        text = whole[:end] + behind
        marks = list(self._special.finditer(text, start))
        end = min([m.start() for m in marks if m.start() < end < m.end()], default=end)
        if self._special.sub("", text[end:]).strip():
            return None
        said = self._marked(content).strip()
        ended = (m.end() for m in marks if m.end() <= end and text[start : m.start()].rstrip().endswith(said))
        end = next(ended, end) if said else end
        marks, at = [m for m in marks if m.end() <= end], end
        while marks and not text[marks[-1].end() : at].strip():  # the first of the last tokens ends a reply
            at, end = marks[-1].span()
            marks.pop()
        return (start, end) if end > start else None

    def _encoded(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of a rendered text, and where each token ends in it."""
        ids, ends, at = list[int](), list[int](), 0
        parts = [(m.start(), m.end(), m[1]) for m in MARKED.finditer(text)]
        for start, end, said in [*parts, (len(text), len(text), None)]:
            for piece, place, special in ((text[at:start], at, True), (said or "", start + 1, False)):
                some, there = self._piece(piece, special, not ids)
                if said and not special and self.tokenizer.id_of(said) in some:
                    raise UserError(f"the tokenizer {self.tokenizer.path!r} makes the special token {said!r} of text")
                ids += some
                ends += [place + n for n in there]
            at = end
        return ids, ends

    def _piece(self, text: str, special: bool, first: bool) -> tuple[list[int], list[int]]:
        """Return the ids of a piece: within a text, SentencePiece puts no space before it, as behind a newline."""
        if not text or first:
            return self.tokenizer.encode_chat(text, special)
        ids, ends = self.tokenizer.encode_chat("\n" + text, special)
        n = len(self._newline)
        if ids[:n] != self._newline:
            return self.tokenizer.encode_chat(text, special)
        return ids[n:], [end - 1 for end in ends[n:]]

    def _marked(self, text: str) -> str:
        """Return a message with marks around what special tokens are called, which it only names."""
        return self._foreign.sub(f"{OPEN}\\g<0>{SHUT}", text)

    def render(self, chat: Sequence[Message], prompt: bool) -> str:
        """Return the text of a chat, with the prompt for an answer or without; it has the marks of special texts."""
        return self._rendered(chat, [(0, len(chat), prompt)])[0][1]

    def _rendered(self, chat: Sequence[Message], stretches: Sequence[tuple[int, int, bool]]) -> list[Rendered]:
        """Return the texts of stretches of a chat, each beside the first.

        Raises
        ------
        UserError
            If the template refuses one, or takes too long.
        """
        messages = [{"role": role, "content": self._marked(text)} for role, text, _ in chat]
        worker = self._worker or self._start()
        self._left += EACH_S * len(stretches)
        worker.limit_s = min(LIMIT_S, max(self._left, EACH_S))
        began = time.monotonic()
        try:
            answer = worker.ask("render", messages=messages, stretches=stretches)
            texts = [(int(n), str(rest)) for n, rest in answer["texts"]]
        except (KeyError, TypeError, ValueError) as e:
            raise UserError(f"{worker.side.name}: its answer is no list of texts") from e
        except BaseException:
            self._worker = None
            self._close()
            raise
        self._left -= time.monotonic() - began
        return texts

    def _start(self) -> Worker:
        side = Side.module(f"the chat template of {self.source.where!r}", "cpuopt.isolate.jinja")
        worker = Worker(side, limit_s=START_S)
        self._close = weakref.finalize(self, worker.close, 0.0)
        try:
            worker.ask("confine")
            worker.limit_s = LIMIT_S
            worker.ask("load", template=self.source.text, variables=dict(self.source.special))
        except BaseException:
            self._close()
            raise
        self._worker = worker
        return worker

"""The forms of conversations as tokens, on which instruction models are trained.

A form is a table of this file, for models without a chat template (`templates`). Its special tokens are placed by their
ids, and text is encoded as text: what a message says becomes no special token.

Source: ChatML (OpenAI 2023), as SmolLM2 and Qwen have it; the model card of Llama 3 (Meta 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UserError
from .shapes import Message
from .tokenizers import Tokenizer


@dataclass(frozen=True)
class Format:
    """The form of a conversation.

    Attributes
    ----------
    start : the special token before the first turn, or ``""``.
    opening, closing : the parts around the end of a turn's text: a special token and a text, again and again. The role
        and the text of a turn stand in braces.
    ends : other special tokens that end a reply besides the first of `closing`, in vocabularies that have them.
    strips : whether a text loses the white space around it.
    """

    start: str
    opening: tuple[str, ...]
    closing: tuple[str, ...]
    ends: tuple[str, ...]
    strips: bool = False

    @property
    def needed(self) -> list[str]:
        """The special tokens that it cannot do without."""
        return [name for name in (self.start, *self.opening[::2], *self.closing[::2]) if name]

    @property
    def names(self) -> list[str]:
        """All its special tokens."""
        return [*self.needed, *self.ends]


FORMATS = {
    "chatml": Format("", ("<|im_start|>", "{role}\n{text}"), ("<|im_end|>", "\n"), ("<|endoftext|>",)),
    "llama3": Format(
        "<|begin_of_text|>",
        ("<|start_header_id|>", "{role}", "<|end_header_id|>", "\n\n{text}"),
        ("<|eot_id|>", ""),
        ("<|eom_id|>", "<|end_of_text|>"),
        strips=True,
    ),
}


def require_format(name: str | None) -> None:
    """Refuse the name of a form that does not exist; None is no name."""
    if name is not None and name not in FORMATS:
        raise UserError(f"--chat-format {name!r}: expected {' or '.join(FORMATS)}")


def format_of(tokenizer: Tokenizer, asked: str | None = None, flag: str = "--chat") -> Format:
    """Return the form that was asked for, or else the one whose special tokens a tokenizer has.

    Parameters
    ----------
    flag : what needs a form, for the message.

    Raises
    ------
    UserError
        If it lacks some of them.
    """
    require_format(asked)
    lacking: list[str] = []
    for name in [asked] if asked else FORMATS:
        missing = next((t for t in FORMATS[name].needed if tokenizer.id_of(t) is None), None)
        if missing is None:
            return FORMATS[name]
        lacking.append(missing)
    form = f" --chat-format {asked}" if asked else ""
    raise UserError(
        f"{flag}{form}: the tokenizer {tokenizer.name} has no {' and no '.join(lacking)}; take a model that was tuned "
        "to chat"
    )


class TurnEncoder:
    """The parts of a conversation in a form, as ids.

    Attributes
    ----------
    special : the ids of the form's special tokens, by their texts.
    ends : those that end a reply.
    """

    def __init__(self, tokenizer: Tokenizer, form: Format) -> None:
        self.tokenizer, self.form = tokenizer, form
        known = {name: tokenizer.id_of(name) for name in form.names}
        self.special = {name: id for name, id in known.items() if id is not None}
        self.ends = {self.special[name] for name in (form.closing[0], *form.ends) if name in self.special}

    def begun(self, system: str) -> list[int]:
        """Return the ids of a chat before a user's first turn."""
        return self._start() + (self._turn("system", system) if system else [])

    def asked(self, before: Sequence[int], chat: Sequence[tuple[str, str]]) -> list[int]:
        """Return the ids of a chat up to the reply that a model writes; `before` are those before its last turn."""
        return [*before, *self._turn(*chat[-1]), *self._ids(self.form.opening, "assistant", "")]

    def example(self, chat: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Return the ids of a chat, and which of them count: counted messages and the token that ends each."""
        ids = self._start()
        counted = [False] * len(ids)
        for role, text, counts in chat:
            parts = [(self._turn(role, text), False)]
            if counts:
                first, *rest = self.closing()
                answer = [*self._ids(("", "{text}"), "", text), first]
                parts = [(self._ids(self.form.opening, role, ""), False), (answer, True), (rest, False)]
            for part, learned in parts:
                ids += part
                counted += [learned] * len(part)
        return ids, counted

    def _start(self) -> list[int]:
        return self._ids((self.form.start,) if self.form.start else (), "", "")

    def _turn(self, role: str, text: str) -> list[int]:
        return self._ids((*self.form.opening, *self.form.closing), role, text)

    def closing(self) -> list[int]:
        """Return the ids behind the text of a turn, of which the first ends it."""
        return self._ids(self.form.closing, "", "")

    def _ids(self, parts: tuple[str, ...], role: str, text: str) -> list[int]:
        """Return the ids of some parts of the form."""
        ids: list[int] = []
        for i, part in enumerate(parts):
            if i % 2 == 0:
                ids += [self.special[part]] if part else []
                continue
            said = self.tokenizer.encode(part.format(role=role, text=text.strip() if self.form.strips else text))
            if made := set(self.special.values()).intersection(said):
                raise UserError(f"the tokenizer {self.tokenizer.name} makes the special token {min(made)} of text")
            ids += said
        return ids

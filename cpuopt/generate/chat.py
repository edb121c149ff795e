"""Chat: a conversation as tokens, in the forms on which instruction models were trained.

A form is a table of this file; a template in a model's files is never executed. Its special tokens are placed by their
ids, and text is encoded as text: what a user types becomes no special token.

Source: ChatML (OpenAI 2023), as SmolLM2 and Qwen have it; the model card of Llama 3 (Meta 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..data.tokenizers import Tokenizer
from ..errors import UserError
from .decoder import Reader, Sampler, check_tokens, generate


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


def format_of(tokenizer: Tokenizer, asked: str | None = None) -> Format:
    """Return the form that was asked for, or else the one whose special tokens a tokenizer has.

    Raises
    ------
    UserError
        If it lacks some of them.
    """
    lacking: list[str] = []
    for name in [asked] if asked else FORMATS:
        missing = next((t for t in FORMATS[name].needed if tokenizer.id_of(t) is None), None)
        if missing is None:
            return FORMATS[name]
        lacking.append(missing)
    form = f" --chat-format {asked}" if asked else ""
    raise UserError(
        f"--chat{form}: the tokenizer {tokenizer.name} has no {' and no '.join(lacking)}; take a model that was tuned "
        "to chat"
    )


class Conversation:
    """Turns with a model, whose tokens its decoder reads once each.

    Parameters
    ----------
    ends : ids that end a reply besides those of the form, such as a model's files name.

    Attributes
    ----------
    tokens : those of all turns so far, of which the decoder has read the first `Reader.position`.
    """

    def __init__(
        self, decoder: Reader, tokenizer: Tokenizer, form: Format, system: str = "", ends: Iterable[int] = ()
    ) -> None:
        self.decoder, self.tokenizer, self.form = decoder, tokenizer, form
        known = {name: tokenizer.id_of(name) for name in (*form.needed, *form.ends)}
        self._special = {name: id for name, id in known.items() if id is not None}
        self._ends = {self._special[name] for name in (form.closing[0], *form.ends) if name in self._special}
        self._ends.update(ends)
        self.tokens = self._ids((form.start,) if form.start else (), "", "")
        self.tokens += self._turn("system", system) if system else []

    def reply(self, text: str, sampler: Sampler, max_tokens: int) -> Iterator[int]:
        """Yield the tokens of the answer to a user's turn. The turn ends with them, however the caller leaves.

        Raises
        ------
        UserError
            If the turn does not fit in the context; the conversation is then as before.
        """
        turn = self._turn("user", text) + self._ids(self.form.opening, "assistant", "")
        at = self.decoder.position
        check_tokens([*self.tokens[at:], *turn], self.decoder.config, self.decoder.context, at)
        self.tokens += turn
        try:
            for token in generate(self.decoder, self.tokens[at:], sampler, max_tokens, self._ends):
                self.tokens.append(token)
                yield token
        finally:
            self.tokens += self._ids(self.form.closing, "", "")

    def _turn(self, role: str, text: str) -> list[int]:
        """Return the tokens of a whole turn."""
        return self._ids((*self.form.opening, *self.form.closing), role, text)

    def _ids(self, parts: tuple[str, ...], role: str, text: str) -> list[int]:
        """Return the tokens of some parts of the form."""
        ids: list[int] = []
        for i, part in enumerate(parts):
            if i % 2 == 0:
                ids.append(self._special[part])
                continue
            said = self.tokenizer.encode(part.format(role=role, text=text.strip() if self.form.strips else text))
            if made := set(self._special.values()).intersection(said):
                raise UserError(f"the tokenizer {self.tokenizer.name} makes the special token {min(made)} of text")
            ids += said
        return ids

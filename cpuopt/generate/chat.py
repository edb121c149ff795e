"""Chat: turns with a model, whose tokens its decoder reads once each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..data.forms import TurnEncoder
from ..data.templates import Template
from .decoder import Reader, Sampler, check_tokens, generate


class Conversation:
    """Turns with a model, whose tokens its decoder reads once each.

    Parameters
    ----------
    ends : ids that end a reply besides those of the encoder, such as a model's files name.

    Attributes
    ----------
    tokens : those of all turns so far, of which the decoder has read the first `Reader.position`.
    """

    def __init__(
        self, decoder: Reader, encoder: TurnEncoder | Template, system: str = "", ends: Iterable[int] = ()
    ) -> None:
        self.decoder, self.encoder = decoder, encoder
        self._ends = encoder.ends | {*ends}
        self._chat = [("system", system)] if system else []
        self.tokens = encoder.begun(system)

    def reply(self, text: str, sampler: Sampler, max_tokens: int) -> Iterator[int]:
        """Return the tokens of the answer to a user's turn as they come. The turn ends with them, however they end.

        Raises
        ------
        UserError
            If the turn does not fit in the context; the conversation is then as before.
        """
        chat = [*self._chat, ("user", text)]
        ids = self.encoder.asked(self.tokens, chat)
        read = zip(ids[:-1], self.tokens[: self.decoder.position], strict=False)
        at = next((n for n, (new, old) in enumerate(read) if new != old), min(len(ids) - 1, self.decoder.position))
        check_tokens(ids[at:], self.decoder.config, self.decoder.context, at)
        self.tokens, self.decoder.position = ids, at  # a template may write earlier turns otherwise
        return self._answered(chat, generate(self.decoder, ids[at:], sampler, max_tokens, self._ends))

    def _answered(self, chat: list[tuple[str, str]], answer: Iterator[int]) -> Iterator[int]:
        start = len(self.tokens)
        try:
            for token in answer:
                self.tokens.append(token)
                yield token
        finally:
            said = self.encoder.tokenizer.decode(self.tokens[start:])
            self._chat = [*chat, ("assistant", said)]
            self.tokens += self.encoder.closing()

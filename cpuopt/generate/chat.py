"""Chat: turns with a model, whose tokens its decoder reads once each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..data.forms import Format, TurnEncoder
from ..data.tokenizers import Tokenizer
from .decoder import Reader, Sampler, check_tokens, generate


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
        self.decoder, self.encoder = decoder, TurnEncoder(tokenizer, form)
        self._ends = self.encoder.ends | {*ends}
        self.tokens = self.encoder.start() + (self.encoder.turn("system", system) if system else [])

    def reply(self, text: str, sampler: Sampler, max_tokens: int) -> Iterator[int]:
        """Yield the tokens of the answer to a user's turn. The turn ends with them, however the caller leaves.

        Raises
        ------
        UserError
            If the turn does not fit in the context; the conversation is then as before.
        """
        turn = self.encoder.turn("user", text) + self.encoder.opening("assistant")
        at = self.decoder.position
        check_tokens([*self.tokens[at:], *turn], self.decoder.config, self.decoder.context, at)
        self.tokens += turn
        try:
            for token in generate(self.decoder, self.tokens[at:], sampler, max_tokens, self._ends):
                self.tokens.append(token)
                yield token
        finally:
            self.tokens += self.encoder.closing()

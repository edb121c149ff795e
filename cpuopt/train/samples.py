"""The text that a model writes while it trains (``--sample-every``)."""

from __future__ import annotations

from collections.abc import Callable

from ..building import Array
from ..data.tokenizers import get_tokenizer
from ..errors import UserError
from ..generate.decoder import Reader, Sampler, check_tokens, generate, text_of
from ..generate.uncached import reader_of, text_program
from ..models import Config, name_of
from .settings import Settings, stored

TEMPERATURE = 0.8


class Samples:
    """Samples of a run's text.

    Parameters
    ----------
    tokenizer : the tokenizer of the run's text.
    """

    def __init__(self, settings: Settings, config: Config, tokenizer: str | None) -> None:
        self.settings, self.config = settings, config
        self.tokenizer = get_tokenizer(tokenizer or "")
        self.prompt = self.tokenizer.start(settings.prompt)
        longest = config.longest(settings.T)
        self.context = min(len(self.prompt) + settings.sample_tokens, longest)
        check_tokens(self.prompt, config, self.context)
        self._reader: Reader | None = None

    def text(self, read: Callable[[str], Array], seed: int) -> str:
        """Return a sample of the model whose parameters a function reads.

        Raises
        ------
        UserError
            For too little memory, or a model that turns out not to be causal.
        """
        s = self.settings
        if self._reader is None:
            self._reader = reader_of(
                self.config,
                trained_length=s.T,
                context=self.context,
                variant=s.variant,
                dtype=stored(s.dtype),
                threads=s.threads,
                processes=s.processes,
                kernel_files=s.kernels,
            )
        for name, p in self._reader.parameters().items():
            p[...] = read(name)
        self._reader.restart()
        tokens = generate(self._reader, self.prompt, Sampler(TEMPERATURE, seed=seed), s.sample_tokens)
        return s.prompt + "".join(text_of(tokens, self.tokenizer))


def require_samples(settings: Settings, config: Config, tokenizer: str | None, given: bool) -> None:
    """Refuse ``--sample-every`` before anything is compiled, if the model cannot write text.

    Parameters
    ----------
    given : whether the model brings its own inputs.

    Raises
    ------
    UserError
        With the reason.
    """
    if not settings.sample_every:
        return
    if given:
        raise UserError(f"--sample-every: {name_of(config)} brings its own inputs, and text is made from tokens alone")
    Samples(settings, config, tokenizer)
    if not config.cached:
        text_program(config, settings.T)

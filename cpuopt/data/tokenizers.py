"""Tokens: text to token ids and back, and the files that keep them.

``bytes`` needs nothing. ``gpt2`` is tiktoken's and needs a vocabulary file, which this module only reads: to fetch it
is the work of ``datasets.prepare``. A token file is llm.c's: 256 int32 (magic, version, count, zeros), then uint16.
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UserError
from ..files import Content, user_cache, write_whole
from ..files.reading import read_file

if TYPE_CHECKING:
    import tiktoken

Tokens = NDArray[np.integer[Any]]


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes
    ----------
    name : ``bytes`` or ``gpt2``.
    vocab_size : the number of ids, which are 0 .. vocab_size - 1.
    eot : the id before a text, from which sampling starts without a prompt.
    stops : the ids that end a text.
    """

    name: str
    vocab_size: int
    eot: int
    stops: frozenset[int] = frozenset()

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Turn text into ids; nothing in it is special, not even ``<|endoftext|>``."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one id below vocab_size."""

    def start(self, text: str) -> list[int]:
        """Turn the beginning of a text into ids; those that a model expects before any text come first."""
        return self.encode(text) or [self.eot]

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text, also of a special one; None where there is none."""
        return None

    def decode(self, tokens: Iterable[int]) -> str:
        """Turn ids into text, with U+FFFD for invalid UTF-8 and for an id that the vocabulary does not have."""
        known = range(self.vocab_size)
        return b"".join(self.token_bytes(int(t)) if t in known else b"\xff" for t in tokens).decode(errors="replace")


class Bytes(Tokenizer):
    """The 256 bytes of UTF-8; a text begins after a newline, the closest byte to a boundary."""

    name, vocab_size, eot = "bytes", 256, ord("\n")

    def encode(self, text: str) -> list[int]:  # noqa: D102
        return list(text.encode(errors="replace"))

    def token_bytes(self, token: int) -> bytes:  # noqa: D102
        return bytes([token])


class GPT2(Tokenizer):
    """GPT-2's byte pair encoding of 50257 tokens."""

    name, vocab_size, eot = "gpt2", 50257, 50256
    stops = frozenset([eot])

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.encoding = encoding

    def encode(self, text: str) -> list[int]:  # noqa: D102
        return self.encoding.encode_ordinary(text)

    def token_bytes(self, token: int) -> bytes:  # noqa: D102
        return self.encoding.decode_single_token_bytes(token)


TOKENIZERS = ("bytes", "gpt2")


def usual_tokenizer(vocab_size: int) -> str:
    """Return the name of the tokenizer for a vocabulary, where nothing else names one."""
    return "gpt2" if vocab_size >= GPT2.vocab_size else "bytes"


def get_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of this name, from files on this machine.

    Raises
    ------
    UserError
        For an unknown name, and for ``gpt2`` where its vocabulary file is neither in tiktoken's cache nor prepared.
    """
    if name not in TOKENIZERS:
        raise UserError(f"unknown tokenizer {name!r}; expected one of {', '.join(TOKENIZERS)}")
    if name == "bytes":
        return Bytes()
    places = vocabulary_places()
    for path in places:
        try:
            content = read_file(path)
        except (OSError, ValueError):  # which the next one may make good
            continue
        if GPT2_VOCABULARY.matches(content):
            return GPT2(_gpt2_encoding(content))
    raise UserError(
        f"the gpt2 tokenizer needs its vocabulary file {str(places[0])!r}, which is missing or damaged; run "
        f"`cpuopt data prepare tinyshakespeare --tokenizer gpt2`, or put there by hand {GPT2_VOCABULARY}"
    )


def byte_lengths(name: str) -> Tokens | None:
    """Return the bytes of text that each id of a tokenizer stands for; None where its files are not on this machine.

    A token before or behind a text stands for none, so it has no bytes.
    """
    try:
        tokenizer = get_tokenizer(name)
    except UserError:
        return None
    lengths = np.array([len(tokenizer.token_bytes(t)) for t in range(tokenizer.vocab_size)])
    lengths[[*tokenizer.stops, *([tokenizer.eot] if tokenizer.stops else [])]] = 0
    return lengths


@dataclass(frozen=True)
class Published:
    """A file that others publish, known by its checksum."""

    url: str
    size: int
    sha256: str

    def matches(self, content: Content) -> bool:
        """Return whether this is the file's content."""
        return hashlib.sha256(content).hexdigest() == self.sha256

    def is_at(self, path: Path) -> bool:
        """Return whether the whole file is at a path."""
        try:
            return path.stat().st_size == self.size and self.matches(read_file(path))
        except (OSError, ValueError):
            return False

    def __str__(self) -> str:
        return f"{self.url} ({self.size} bytes, sha256 {self.sha256})"


GPT2_VOCABULARY = Published(
    # tiktoken's "gpt2" needs two files; its "r50k_base" has the same pattern, ids and <|endoftext|>, and needs one.
    url="https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken",
    size=835_554,
    sha256="306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
)
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
"""How GPT-2 cuts text before merging, in tiktoken's faster spelling (tiktoken_ext/openai_public.py)."""


def vocabulary_places() -> list[Path]:
    """List the paths where gpt2's vocabulary file may lie; the first is where to put it.

    tiktoken's cache directory if the user named one; else the data directory, which a cluster's compute nodes share
    with the node that has a network, and then tiktoken's default in the temporary directory.
    """
    name = hashlib.sha1(GPT2_VOCABULARY.url.encode()).hexdigest()  # tiktoken's own rule, so its caches serve
    named = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    caches = [Path(named)] if named else [data_directory() / "tiktoken", Path(tempfile.gettempdir(), "data-gym-cache")]
    return [cache / name for cache in caches]


@cache
def _gpt2_encoding(content: bytes) -> tiktoken.Encoding:
    import tiktoken

    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, content.splitlines())}
    special = {"<|endoftext|>": GPT2.eot}
    return tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)


def data_directory() -> Path:
    """Return the directory of prepared data: ``$CPUOPT_DATA_DIR``, else ``cpuopt/data`` in the user's cache."""
    if named := os.environ.get("CPUOPT_DATA_DIR"):
        return Path(named)
    return user_cache() / "data"


# Token files. llm.c: dev/data/data_common.py writes them, llmc/dataloader.h reads them.

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 256 * 4
OTHER_MAGIC = {
    20240326: "an llm.c GPT-2 model",
    20240327: "an llm.c debug state",
    20240328: "an llm.c tokenizer",
    20240522: "an llm.c evaluation set",
    20240527: "an llm.c training state",
    20240801: "a file of Llama 3 tokens",
    20240803: "an llm.c Llama 3 model",
}


def read_tokens(path: Path) -> Tokens:
    """Map a token file into memory, read-only, after a check of its header.

    Raises
    ------
    UserError
        Where the file cannot be read, is no token file, or is shorter or longer than its header says.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            count = _check_header(str(path), file.read(HEADER_BYTES), size)
            mapped = np.memmap(file, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))
    except OSError as e:
        raise UserError(f"cannot read token file {str(path)!r}: {e.strerror or e}") from e
    return np.asarray(mapped)  # a plain view: slices of the memmap class cost a microsecond each


def _check_header(path: str, head: bytes, size: int) -> int:
    """Return the number of tokens, where magic, version, count and file size agree."""

    def wrong(what: str) -> UserError:
        return UserError(f"token file {path!r}: {what}; give a file from llm.c's dev/data or `cpuopt data prepare`")

    if len(head) < HEADER_BYTES:
        raise wrong(f"has {size} bytes; expected a header of {HEADER_BYTES}")
    magic, version, count = (int(x) for x in np.frombuffer(head, "<i4", count=3))
    if magic != MAGIC:
        known = f", {OTHER_MAGIC[magic]}" if magic in OTHER_MAGIC else ""
        raise wrong(f"byte 0, the magic number, is {magic}{known}; expected {MAGIC}, GPT-2 tokens")
    if version != VERSION:
        raise wrong(f"byte 4, the version, is {version}; expected {VERSION}")
    if count < 1:
        raise wrong(f"byte 8, the number of tokens, is {count}; expected at least 1")
    if size != HEADER_BYTES + 2 * count:
        raise wrong(
            f"has {size} bytes; expected {HEADER_BYTES + 2 * count}, because byte 8 says {count} tokens of 2 bytes"
        )
    return count


def write_tokens(path: Path, tokens: ArrayLike) -> None:
    """Write a token file: whole, or not at all.

    Raises
    ------
    UserError
        Where an id does not fit in uint16, there is none or more than the header can count, or the disk refuses.
    """
    array = np.asarray(tokens)
    got = f"token file {str(path)!r}: got"
    if array.ndim != 1 or not 1 <= array.size < 2**31 or array.dtype.kind not in "iu":
        raise UserError(f"{got} {array.dtype} of shape {array.shape}; expected 1 to 2**31-1 token ids")
    if array.min() < 0 or array.max() > 65535:
        raise UserError(f"{got} ids from {array.min()} to {array.max()}; expected 0 to 65535, which uint16 holds")
    header = np.zeros(256, "<i4")
    header[:3] = MAGIC, VERSION, array.size
    write_whole(path, [header.data, array.astype("<u2").data])

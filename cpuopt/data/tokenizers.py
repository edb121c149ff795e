"""Tokenizers: text to token ids and back.

``bytes`` needs nothing. ``gpt2`` is tiktoken's and needs a vocabulary file, which this module only reads: to fetch it
is the work of ``datasets.prepare``. Others are files that come with a model: Hugging Face's ``tokenizer.json``, read by
the library ``tokenizers``, as are the one inside GGUF and llama2.c's ``tokenizer.bin``.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError, optional
from ..files import Content, user_cache
from ..files.gguf import Gguf, is_gguf
from ..files.reading import parse_json, read_file
from ..wording import hub_hint
from . import companions, ggml, pieces, untrusted
from .sentencepiece import read_pieces

if TYPE_CHECKING:
    import tiktoken


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes
    ----------
    name : ``bytes``, ``gpt2``, or the kind of its file: ``tokenizer.json``, ``tokenizer.bin``.
    vocab_size : the number of ids, which are 0 .. vocab_size - 1.
    eot : the id before a text, from which sampling starts without a prompt.
    stops : the ids that end a text or a turn.
    end : the one of them that ends a text to train on; None if there is none.
    pad : the id that fills up; None if there is none.
    special_tokens : the texts of special tokens by what they are for: ``bos_token``, ``eos_token``, ``pad_token``,
        ``unk_token`` and others that a model's files name.
    chat_templates : the chat templates of the model by their names; the usual one is ``default``.
    """

    name: str
    vocab_size: int
    eot: int
    stops: frozenset[int] = frozenset()
    end: int | None = None
    pad: int | None = None
    special_tokens: Mapping[str, str] = MappingProxyType({})
    chat_templates: Mapping[str, str] = MappingProxyType({})

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
        """Return the id of a token by its text, also of a special one; None if there is none."""
        return None

    def decode(self, tokens: Iterable[int]) -> str:
        """Turn ids into text, with U+FFFD for invalid UTF-8 and for an id that the vocabulary does not have."""
        known = range(self.vocab_size)
        return b"".join(self.token_bytes(int(t)) if t in known else b"\xff" for t in tokens).decode(errors="replace")


class Bytes(Tokenizer):
    """The 256 bytes of UTF-8; a text begins after a newline, the closest byte to a boundary.

    Two bytes that no UTF-8 has begin and end a turn of a chat.
    """

    name, vocab_size, eot = "bytes", 256, ord("\n")
    turns: ClassVar = {"<|im_start|>": 0xFE, "<|im_end|>": 0xFF}

    def id_of(self, token: str) -> int | None:  # noqa: D102
        return self.turns.get(token)

    def encode(self, text: str) -> list[int]:  # noqa: D102
        return list(text.encode(errors="replace"))

    def token_bytes(self, token: int) -> bytes:  # noqa: D102
        return bytes([token])


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte pair encoding of 50257 tokens."""

    name, vocab_size, eot, end = "gpt2", 50257, 50256, 50256
    stops = frozenset([eot])
    special_tokens = MappingProxyType(dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"))

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.encoding = encoding

    def encode(self, text: str) -> list[int]:  # noqa: D102
        return self.encoding.encode_ordinary(text)

    def token_bytes(self, token: int) -> bytes:  # noqa: D102
        return self.encoding.decode_single_token_bytes(token)


BEGINNINGS = ("<|begin_of_text|>", "<bos>", "<s>", "<|endoftext|>")
"""Special tokens before a text, of which the first is taken if no file names one."""
ENDS = ("<|end_of_text|>", "<|endoftext|>", "<eos>", "</s>", "<|eot_id|>", "<|im_end|>")
"""Special tokens that end a text or a turn, if no file names one."""


MOST = 1 << 24
"""Ids of a file, so that a table of them fits in memory."""
LARGEST_JSON = 64 << 20
"""Bytes of a ``tokenizer.json``; Gemma's has 33 MB."""
MARKING = (companions.GENERATION, companions.CONFIG)
"""The files that name the ids of marks."""


def text_of(text: str) -> str:
    """Return a text without halves of surrogate pairs, which are no text."""
    return text.encode(errors="replace").decode()


class OfModel(Tokenizer):
    """A tokenizer in the files of a model, some of which name the tokens that begin, end and fill up.

    Attributes
    ----------
    path : of its file.
    texts : the texts of the tokens, by their ids.
    special : the ids of special tokens, by their texts.
    before, behind : what the tokenizer itself puts around a text.
    growth : how many times as long a text can become, at most.
    """

    path: str
    texts: Mapping[int, str]
    special: Mapping[str, int]
    before: Sequence[int]
    behind: Sequence[int]
    growth: int

    @abstractmethod
    def _encoded(self, text: str) -> list[int]:
        """Turn text into ids."""

    def encode(self, text: str) -> list[int]:  # noqa: D102
        text = text_of(text)
        with untrusted.guarded(self.path, "fails on the text"):
            self._require_bounded(text)
            return self._encoded(text)

    def _require_bounded(self, text: str) -> None:
        if self.growth > untrusted.USUAL:
            untrusted.require_bounded(text, lambda piece: [self.texts[i] for i in self._encoded(piece)], self.path)

    def start(self, text: str) -> list[int]:  # noqa: D102
        return [*self.before, *self.encode(text)] or [self.eot]

    def _mark(self, folder: Path, files: Mapping[str, bytes], own: Mapping[str, str] | None = None) -> None:
        """Find the tokens that begin and end a text, as the files name them; by usual names only if they do not.

        Parameters
        ----------
        own : the texts of special tokens that the tokenizer's own file names, for those that no other file does.
        """
        tables = {folder / name: companions.read_table(folder / name, files[name]) for name in MARKING if name in files}
        marks, texts = companions.marks_of(tables), companions.special_texts(folder, files)
        named_ids = {"bos_token": marks.bos, "eos_token": marks.eos or None, "pad_token": marks.pad}
        texts = {key: text for key, text in (own or {}).items() if named_ids.get(key) is None} | texts
        named = {key: i for key, text in texts.items() if (i := self.id_of(text)) is not None}

        def known(*ids: int | None, usual: Sequence[str] = ()) -> list[int]:
            found = [i for i in ids if i is not None and i in self.texts]
            return [*dict.fromkeys(found or [self.special[name] for name in usual if name in self.special])]

        ends = known(named.get("eos_token"), *marks.eos, *self.behind, usual=ENDS)
        begins = known(*self.before, named.get("bos_token"), marks.bos, usual=BEGINNINGS)
        self.stops, self.end = frozenset(ends), next(iter(ends), None)
        self.eot = next(iter(begins), self.end or 0)
        self.pad = next(iter(known(named.get("pad_token"), marks.pad)), None)
        ids = {"bos_token": next(iter(begins), None), "eos_token": self.end, "pad_token": self.pad}
        self.special_tokens = {key: self.texts[i] for key, i in ids.items() if i is not None} | texts
        self.chat_templates = companions.chat_templates(folder, files)


class Json(OfModel):
    """Hugging Face's ``tokenizer.json``, of byte pairs or of SentencePiece's kind."""

    name = "tokenizer.json"

    def __init__(self, path: Path) -> None:
        tokenizers, self.path = optional("tokenizers", repr(str(path)), "hf"), str(path)
        try:
            files = self.files(path)
            content = files[Json.name]
            found = parse_json(content)  # its JSON is strict, and its growth bounded, before a library reads it
            self.to_bytes, self.growth = _bytes_of(found.get("decoder")), untrusted.growth(found)
        except OSError as e:
            raise UserError(f"cannot read {self.path!r}: {e.strerror or e}") from e
        except (ValueError, RecursionError) as e:
            raise UserError(f"{self.path!r} is no tokenizer.json that can be read: {repr(str(e))[:200]}") from e
        with untrusted.guarded(self.path, "is no tokenizer.json that can be read"):
            self.encoding = tokenizers.Tokenizer.from_str(content.decode())
            self._read()
        model = found["model"]
        whole = (
            model.get("type") != "BPE"
        )  # such a model has its special tokens among its pieces, and finds them in text
        unknown = (model.get("unk_id"), self.id_of(str(model.get("unk_token"))))
        self.never = frozenset(self.special.values()).difference(unknown) if whole else frozenset()
        self._mark(path.parent, files)

    def files(self, path: Path) -> dict[str, bytes]:
        """Return the content of the file as ``tokenizer.json``, and of those beside it that say more."""
        more = companions.beside(path) if path.name == Json.name else {}
        return {Json.name: read_file(path, most=LARGEST_JSON)} | more

    def _read(self) -> None:
        """Find what the file says of its tokens."""
        self.encoding.no_truncation()
        self.encoding.no_padding()
        self.encoding.encode_special_tokens = True  # as text, not as what they stand for
        ids = self.encoding.get_vocab(with_added_tokens=True)
        if not ids or max(ids.values()) >= MOST:
            raise UserError(f"{self.path!r} has {len(ids)} tokens; expected 1 or more, with ids below {MOST}")
        self.texts = {i: text for text, i in ids.items()}
        added = self.encoding.get_added_tokens_decoder()
        self.whole: dict[int, bytes] = {i: token.content.encode() for i, token in added.items()}
        self.special = {token.content: i for i, token in added.items() if token.special}
        self.vocab_size = max(self.texts) + 1
        plain, full = (self.encoding.encode("a", add_special_tokens=special).ids for special in (False, True))
        starts = (k for k in range(len(full)) if plain and full[k : k + len(plain)] == plain)
        self.before, self.behind = (full[: (k := next(starts, 0))], full[k + len(plain) :]) if plain else ([], [])

    def encode_chat(self, text: str, special: bool) -> tuple[list[int], list[int]]:
        """Turn text into ids and where each ends in it; with `special`, what special tokens are called is these."""
        text = text_of(text)
        with untrusted.guarded(self.path, "fails on the text"):
            self._require_bounded(text)
            self.encoding.encode_special_tokens = not special
            try:
                found = self.encoding.encode(text, add_special_tokens=False)
            finally:
                self.encoding.encode_special_tokens = True
            return list(found.ids), [end for _, end in found.offsets]

    def _encoded(self, text: str) -> list[int]:
        ids = list(self.encoding.encode(text, add_special_tokens=False).ids)
        if not self.never.isdisjoint(ids):
            token = self.texts[next(i for i in ids if i in self.never)]
            raise UserError(f"{self.path!r} makes a special token of {token[:60]!r} in a text; take it out of the text")
        return ids

    def id_of(self, token: str) -> int | None:  # noqa: D102
        found: int | None = self.encoding.token_to_id(token)
        return found

    def token_bytes(self, token: int) -> bytes:  # noqa: D102
        if token in self.whole:
            return self.whole[token]
        return self.to_bytes(self.texts[token]) if token in self.texts else b"\xff"


class Inside(Json):
    """The tokenizer inside a GGUF file, read as the ``tokenizer.json`` that says the same."""

    def files(self, path: Path) -> dict[str, bytes]:  # noqa: D102
        return ggml.files(Gguf(path))


def _bytes_of(decoder: Any) -> Callable[[str], bytes]:
    """Return the function from a token's text to its bytes; the decoder of a ``tokenizer.json`` tells the kind."""
    parts = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = {part.get("type") if isinstance(part, dict) else None for part in parts}
    if "ByteLevel" in kinds:
        return lambda text: bytes(byte for c in text for byte in BYTES.get(c) or c.encode())
    if not kinds or not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise ValueError(f"its decoder is {repr(decoder)[:80]}; expected ByteLevel, or SentencePiece's")
    replaced = [_replaced(part) for part in parts if part["type"] in ("Replace", "Metaspace")]

    def spaced(text: str) -> bytes:
        if "ByteFallback" in kinds and (m := BYTE.fullmatch(text)):
            return bytes([int(m[1], 16)])
        for mark, space in replaced:
            text = text.replace(mark, space)
        return text.encode()

    return spaced


def _replaced(part: Mapping[str, Any]) -> tuple[str, str]:
    """Return what a step of a decoder replaces in a token's text, and by what: a mark by a space, as a rule."""
    pattern, mark, space = part.get("pattern"), part.get("replacement", ggml.SPACE), part.get("content", " ")
    if part["type"] == "Replace":
        mark = pattern.get("String") if isinstance(pattern, dict) else None
    if not isinstance(mark, str) or not isinstance(space, str) or not mark or len(space) > untrusted.LONGEST:
        raise ValueError(f"its decoder replaces {repr(part)[:80]}; expected a text by one of 8 characters at most")
    return mark, space


BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> Iterator[tuple[str, bytes]]:
    """Yield the characters that stand for the 256 bytes: themselves if they can be seen, others from U+0100 on.

    Source: GPT-2's ``encoder.py`` (``bytes_to_unicode``).
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in seen]
    yield from ((chr(byte), bytes([byte])) for byte in seen)
    yield from ((chr(0x100 + n), bytes([byte])) for n, byte in enumerate(others))


BYTES = dict(_byte_alphabet())


class SentencePiece(OfModel):
    """SentencePiece's ``tokenizer.model``, of pieces that merge or of a unigram model.

    Tokens that files beside it add have ids behind its pieces, and no text becomes one.
    """

    texts: dict[int, str]

    name = "tokenizer.model"

    def __init__(self, path: Path) -> None:
        found, self.path = optional("sentencepiece", repr(str(path)), "hf"), str(path)
        files = companions.beside(path, (*companions.READ, companions.ADDED)) if path.name == self.name else {}
        try:
            content = read_file(path, most=LARGEST_JSON)
            self.pieces = read_pieces(content)
            self.growth = untrusted.bounded(untrusted.growth_of_characters(self.pieces.charsmap))
        except OSError as e:
            raise UserError(f"cannot read {self.path!r}: {e.strerror or e}") from e
        except ValueError as e:
            raise UserError(f"{self.path!r} is no tokenizer.model of SentencePiece: {e}") from e
        with untrusted.guarded(self.path, "is no tokenizer.model of SentencePiece"):
            self.encoding = found.SentencePieceProcessor()
            self.encoding.LoadFromSerializedProto(content)
        self.texts = dict(enumerate(self.pieces.texts)) | companions.added_texts(path.parent, files)
        if max(self.texts) >= MOST:
            raise UserError(f"{self.path!r} has a token {max(self.texts)}; expected ids below {MOST}")
        self.ids = {text: i for i, text in reversed(self.texts.items())}
        self.vocab_size, n = max(self.texts) + 1, len(self.pieces.texts)
        self.special = {text: i for i, text in self.texts.items() if i >= n or self.pieces.types[i] == ggml.CONTROL}
        own = {f"{what}_token": getattr(self.encoding, f"{what}_id")() for what in ("bos", "eos", "pad", "unk")}
        named = {key: self.texts[i] for key, i in own.items() if i >= 0}
        adds = companions.settings(path.parent, files).get("add_bos_token", True) is True
        self.before, self.behind = [own["bos_token"]] if adds and own["bos_token"] >= 0 else [], []
        self._mark(path.parent, files, named)

    def _encoded(self, text: str) -> list[int]:
        return list(self.encoding.encode(text))

    def id_of(self, token: str) -> int | None:  # noqa: D102
        return self.ids.get(token)

    def token_bytes(self, token: int) -> bytes:  # noqa: D102
        if (text := self.texts.get(token)) is None:
            return b"\xff"
        kind = self.pieces.types[token] if token < len(self.pieces.texts) else ggml.CONTROL
        if kind == ggml.BYTE and (m := BYTE.fullmatch(text)):
            return bytes([int(m[1], 16)])
        return text.encode() if kind == ggml.CONTROL else text.replace(ggml.SPACE, " ").encode()


class Llama2c(Json):
    """llama2.c's ``tokenizer.bin``, read as the ``tokenizer.json`` that says the same: 1 begins a text, 2 ends it."""

    name = "tokenizer.bin"

    def files(self, path: Path) -> dict[str, bytes]:  # noqa: D102
        return pieces.files(path)


TOKEN_FILE = ".bin"
"""How the name of a file of tokens ends, which needs no tokenizer."""
PADDED = 50304
"""Rows of GPT-2's embedding, if they are padded to a multiple of 128."""
TOKENIZERS = ("bytes", "gpt2")
"""Tokenizers by name."""
Kind = type[Json] | type[SentencePiece]
KINDS: dict[str, Kind] = {kind.name: kind for kind in (Json, SentencePiece, Llama2c)}
"""Tokenizers in files, by the file's name beside a model's weights; elsewhere its ending tells."""


def usual_tokenizer(vocab_size: int) -> str:
    """Return the name of the tokenizer for a vocabulary, where nothing else names one."""
    return "gpt2" if vocab_size >= GPT2Tokenizer.vocab_size else "bytes"


def tokenizer_beside(folder: Path) -> str | None:
    """Return the path of the tokenizer's file in a folder, or None."""
    return next((str(folder / name) for name in KINDS if (folder / name).is_file()), None)


def located(name: str) -> str:
    """Return the path of the tokenizer's file in a directory; any other name as it is.

    Raises
    ------
    UserError
        For a directory that has none.
    """
    if not os.path.isdir(name):
        return name
    if (found := tokenizer_beside(Path(name))) is None:
        raise UserError(f"the directory {name[:200]!r} has no tokenizer; expected one of {', '.join(KINDS)} in it")
    return found


def own_tokenizer(name: str | None, path: Path, vocab_size: int) -> str:
    """Return the tokenizer of a model in files: the one that they name, or else the one that its vocabulary tells.

    Raises
    ------
    UserError
        If they have none, and the vocabulary is neither one of bytes nor GPT-2's, which may be padded.
    """
    if name is not None:
        return name
    if vocab_size <= Bytes.vocab_size or GPT2Tokenizer.vocab_size <= vocab_size <= PADDED:
        return usual_tokenizer(vocab_size)
    raise UserError(
        f"{str(path)!r} comes without a tokenizer for its {vocab_size:,} tokens; put its {' or '.join(KINDS)} beside "
        "the weights, or name one with --tokenizer (bytes trains on the bytes of a text)"
    )


def kind_of(file: str) -> str | None:
    """Return the name that a tokenizer's file has beside weights; None if it is no such file."""
    return next((name for name in KINDS if Path(name).suffix == Path(file).suffix), None)


def tokenizer_files(tokenizer: str | None) -> dict[str, bytes]:
    """Return what to keep with a model of a tokenizer: the content of its files, by their names.

    Raises
    ------
    UserError
        If they cannot be read.
    """
    if tokenizer in (None, *TOKENIZERS):
        return {}
    if is_gguf(path := Path(located(str(tokenizer)))):
        return ggml.files(Gguf(path))
    more = companions.travelling(path) if path.name in (Json.name, SentencePiece.name) else {}
    try:
        return {kind_of(path.name) or path.name: read_file(path)} | more
    except (OSError, ValueError) as e:
        raise UserError(f"cannot read the tokenizer {str(path)!r}: {e}") from e


def get_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer from files on this machine, by its name or by the path of its file.

    Raises
    ------
    UserError
        For an unknown name, for ``gpt2`` where its vocabulary file is neither in tiktoken's cache nor prepared, and for
        a file that cannot be read.
    """
    if name == "bytes":
        return Bytes()
    if name == "gpt2":
        return _gpt2()
    name = located(name)
    kind = Inside if is_gguf(Path(name)) else KINDS.get(kind_of(name) or "")
    if kind is None:
        raise UserError(
            f"unknown tokenizer {name[:200]!r}; expected one of {', '.join(TOKENIZERS)}, or a file: "
            f"{', '.join(KINDS)}, GGUF{hub_hint(name)}"
        )
    try:
        os.stat(name)
    except (OSError, ValueError) as e:
        raise UserError(f"there is no tokenizer {name[:200]!r}; expected {', '.join([*TOKENIZERS, *KINDS])}") from e
    folder = Path(name).parent
    read = (Path(name), *(folder / file for file in companions.READ))
    return _from_file(kind, name, tuple(map(_version, (*read, *companions.templates_in(folder)))))


def _version(path: Path) -> tuple[str, int, int]:
    """Return what changes when a file does."""
    try:
        status = os.stat(path)
    except OSError:
        return str(path), -1, -1
    return str(path), status.st_size, status.st_mtime_ns


@cache
def _from_file(kind: Kind, path: str, versions: tuple[tuple[str, int, int], ...]) -> Tokenizer:
    return kind(Path(path))


def _gpt2() -> GPT2Tokenizer:
    places = vocabulary_places()
    for path in places:
        try:
            content = read_file(path)
        except (OSError, ValueError):  # which the next one may make good
            continue
        if GPT2_VOCABULARY.matches(content):
            return GPT2Tokenizer(_gpt2_encoding(content))
    raise UserError(
        f"the gpt2 tokenizer needs its vocabulary file {str(places[0])!r}, which is missing or damaged; run "
        f"`cpuopt data prepare tinyshakespeare --tokenizer gpt2`, or put there by hand {GPT2_VOCABULARY}"
    )


def require_fit(name: str | None, vocab_size: int) -> None:
    """Refuse a tokenizer's file with more tokens than a model's vocabulary, such as another model's in the same folder.

    One that cannot be read on this machine is let through: to copy it, nothing has to be read.
    """
    try:
        n = 0 if name in (None, *TOKENIZERS) else get_tokenizer(str(name)).vocab_size
    except UserError:
        return
    if n > vocab_size:
        raise UserError(
            f"the tokenizer {name!r} has {n} tokens, and the model's vocabulary {vocab_size}; "
            f"name the model's own with --tokenizer: {', '.join(TOKENIZERS)}, or a file"
        )


def byte_lengths(name: str) -> NDArray[np.int64] | None:
    """Return the bytes of text that each id of a tokenizer stands for; None if its files are not on this machine.

    A token before or behind a text stands for none, so it has no bytes.
    """
    try:
        tokenizer = get_tokenizer(name)
    except UserError:
        return None
    lengths = np.array([len(tokenizer.token_bytes(t)) for t in range(tokenizer.vocab_size)], np.int64)
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
    special = {"<|endoftext|>": GPT2Tokenizer.eot}
    return tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)


def data_directory() -> Path:
    """Return the directory of prepared data: ``$CPUOPT_DATA_DIR``, else ``cpuopt/data`` in the user's cache."""
    if named := os.environ.get("CPUOPT_DATA_DIR"):
        return Path(named)
    return user_cache() / "data"

"""A corpus from the name that a user gives. Nothing here uses the network, and importing it reads no file."""

from __future__ import annotations

import glob
import os
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import translate
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Literal
from zlib import crc32

import numpy as np

from ..errors import UserError
from ..machine import cores
from .batches import Batches, require_known_ids, require_one_batch
from .datasets import DATASETS, dataset_files, prepare_command
from .encoding import decoded, encode_text
from .shapes import begins_with_example, holds_examples
from .stored import File, FileTokens, Source, tokens_of
from .tokenizers import TOKENIZERS, get_tokenizer, require_fit, usual_tokenizer
from .tokens import open_tokens

Split = Literal["train", "val", "all"]
CHUNK = 1 << 25
"""Tokens that are hashed at a time; another number gives other fingerprints."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens to train on, and others to validate on.

    Attributes
    ----------
    name : the name that the user gave: ``builtin``, a dataset, a path or a glob.
    source : a description of the origin of the tokens.
    tokenizer : its name or its file, for `get_tokenizer`.
    vocab_size : that of the model; each batch is checked against it.
    train, val : (n,) uint8, uint16 or int32, read-only; those of a large file are read by slices.
    files : the files that they come from.
    """

    name: str
    source: str
    tokenizer: str
    vocab_size: int
    train: Source
    val: Source
    files: tuple[File, ...] = ()

    @property
    def n_tokens(self) -> int:
        """The tokens of both splits."""
        return self.train.size + self.val.size

    @property
    def description(self) -> str:
        """One line for the log."""
        counts = f"{self.train.size:,} tokens to train on, {self.val.size:,} to validate"
        return f"{self.name}: {counts} ({self.tokenizer}); {self.source}"

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits, from every token of both splits, by which a resumed run notices other data."""
        parts = []
        with ThreadPoolExecutor(cores()) as pool:  # zlib works without Python's lock
            for tokens in (self.train, self.val):
                crcs = pool.map(partial(_crc, tokens), range(0, tokens.size, CHUNK))
                parts.append((tokens.dtype.str, tokens.size, list(crcs)))
        return sha256(repr(parts).encode()).hexdigest()[:16]

    @property
    def ends(self) -> str:
        """Eight hex digits, from the sizes and the ends of both splits, as in checkpoints of earlier versions."""
        digest = 0
        for tokens in (self.train, self.val):
            for part in (np.array([tokens.size]), tokens[: 1 << 20], tokens[-(1 << 20) :]):
                digest = crc32(part.astype("<i8").data, digest)
        return f"{digest:08x}"

    @property
    def whole(self) -> Source:
        """Both splits, one after the other; without a copy if they lie so in memory or in one file."""
        first, second = self.train, self.val
        if isinstance(first, FileTokens) and isinstance(second, FileTokens) and first.file is second.file:
            return FileTokens(first.file, first.dtype, first.start, self.n_tokens)
        if isinstance(first, FileTokens) or isinstance(second, FileTokens):
            return np.concatenate([first[:], second[:]])
        if first.ctypes.data + first.nbytes == second.ctypes.data and first.dtype == second.dtype:
            return np.lib.stride_tricks.as_strided(first, (self.n_tokens,), first.strides, writeable=False)
        return np.concatenate([first, second])

    def changes(self) -> list[str]:
        """Return what has happened to the files' content on disk since they were read, a line for each."""
        return [text for file in self.files if (text := file.changed())]

    def batches(self, split: Split, B: int, T: int, seed: int | None = None) -> Batches:
        """Cut a split into batches: shuffled by `seed`, or in the order of the text without one."""
        tokens = self.whole if split == "all" else self.train if split == "train" else self.val
        return Batches(tokens, B, T, seed=seed, vocab_size=self.vocab_size, name=f"{self.name} ({split})")


def _crc(tokens: Source, start: int) -> int:
    """Return the checksum of a chunk of tokens."""
    crc, end = 0, min(start + CHUNK, tokens.size)
    for at in range(start, end, PIECE):
        crc = crc32(np.ascontiguousarray(tokens[at : min(at + PIECE, end)]).data, crc)
    return crc


def load_corpus(
    spec: str,
    *,
    vocab_size: int,
    T: int,
    B: int,
    tokenizer: str | None = None,
    needed: Sequence[Split] = ("train", "val"),
) -> Corpus:
    """Load the corpus of a name.

    Parameters
    ----------
    spec
        ``builtin``, a dataset's name, a file, or a glob such as ``src/**/*.txt``. A name comes before a file so called,
        so that it means the same in every directory; ``./tinyshakespeare`` is the file. A ``.bin`` is read as llm.c's
        token file, anything else as text, but for examples (`is_examples`), which are refused.
    vocab_size
        The model's vocabulary, which selects the tokenizer of a dataset: ``gpt2`` from 50257 on, else ``bytes``.
    T, B
        Tokens of a row and rows of a batch.
    tokenizer
        The tokenizer, by its name or its file; without one, the bytes of a text are the tokens.
    needed
        The splits that must have one batch at least.

    Raises
    ------
    UserError
        If no data have that name, or they are invalid or too short.
    """
    require_fit(tokenizer, vocab_size)
    if is_examples(spec):
        raise UserError(
            f"{spec!r} holds examples, and no text; 'cpuopt train', 'eval' and 'data show' read examples; a file whose "
            "name ends in .txt is text"
        )
    files: tuple[File, ...] = ()
    if spec == "builtin":
        source, texts = _builtin()
        found = tokenizer or "bytes"
        train, val = split_texts(_encoded(texts, found))
    elif spec in DATASETS:
        source, found, (train, val), files = _dataset(spec, vocab_size, tokenizer)
    else:
        source, found, (train, val), files = _files(spec, _find(spec), vocab_size, tokenizer)
    corpus = Corpus(spec, source, found, vocab_size, train, val, files)
    for split, tokens in ("train", train), ("val", val):
        if not isinstance(tokens, FileTokens):
            tokens.flags.writeable = False
        if split in needed:
            require_one_batch(f"{spec} ({split})", tokens.size, B, T)
        require_known_ids(f"{spec} ({split})", tokens, vocab_size)
    return corpus


Loaded = tuple[str, str, tuple[Source, Source], tuple[File, ...]]
"""A corpus's source, tokenizer, splits, and files."""


def _dataset(name: str, vocab_size: int, tokenizer: str | None) -> Loaded:
    prepared = tokenizer or usual_tokenizer(vocab_size)
    prepared = prepared if prepared in TOKENIZERS else "bytes"  # its text, which is then encoded
    paths = dataset_files(name, prepared)
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise UserError(
            f"dataset {name!r} is not prepared for a vocabulary of {vocab_size}: there is no {missing[0]!r}; "
            f"run `{prepare_command(name, prepared)}`"
        )
    return _files(name, paths[:1], vocab_size, tokenizer)


def _encoded(texts: Mapping[str, Source], tokenizer: str) -> Mapping[str, Source]:
    """Turn the bytes of texts into tokens."""
    if tokenizer == "bytes":
        return texts
    t = get_tokenizer(tokenizer)
    return {name: encode_text(t, decoded(text), text.size) for name, text in texts.items()}


def _find(spec: str) -> list[Path]:
    """Find the file of that name, or else the files that match it as a glob, in order."""
    path = os.path.expanduser(spec)
    if os.path.isfile(path):
        return [Path(path)]
    if glob.has_magic(path):
        if paths := _glob(path):
            return paths
        raise UserError(f"no file matches {spec!r}; expected a glob such as 'texts/**/*.txt', quoted for the shell")
    if os.path.isdir(path):
        raise UserError(
            f"{spec!r} is a directory; expected a file or a glob; try {os.path.join(spec, '**', '*.txt')!r}"
        )
    beside = _glob(os.path.join(os.path.dirname(path), "*"))
    near = get_close_matches(path, ["builtin", *DATASETS, *map(str, beside)], n=3)
    raise UserError(
        f"there is no data {spec!r}{', nearest are ' + ', '.join(map(repr, near)) if near else ''}; "
        f"expected builtin, {', '.join(DATASETS)}, a file or a glob"
    )


def is_examples(spec: str) -> bool:
    """Return whether ``--data`` names examples, by their content, and no text or tokens.

    Raises
    ------
    UserError
        If there are no such data, or both examples and texts.
    """
    if spec == "builtin" or spec in DATASETS:
        return False
    kinds = {holds_examples(path): str(path) for path in reversed(_find(spec))}
    if {True, False} <= kinds.keys():
        raise UserError(
            f"{spec!r} matches examples, such as {kinds[True]!r}, and text, such as {kinds[False]!r}; give one of them"
        )
    return False not in kinds


def files_of(spec: str) -> list[Path]:
    """Return the files that `load_corpus` reads for a name; none of ``builtin``.

    Raises
    ------
    UserError
        If there are none.
    """
    if spec in DATASETS:
        return [path for tokenizer in TOKENIZERS for path in dataset_files(spec, tokenizer)]
    found = [] if spec == "builtin" else _find(spec)
    return [*found, *(other for path in found if (other := held_out_beside(path)))]


def held_out_beside(path: Path) -> Path | None:
    """Return the token file for validation that belongs to one for training, as of fineweb_train_000001.bin."""
    shard = re.fullmatch(r"(.*)_train(_\d+)?\.bin", path.name)
    other = path.with_name(f"{shard[1]}_val{'_000000' if shard[2] else ''}.bin") if shard else None
    return other if other and other.is_file() else None


def _glob(pattern: str) -> list[Path]:
    try:
        return sorted(Path(path) for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
    except ValueError:  # a NUL, or a character that no file name can have
        return []


def _files(name: str, paths: list[Path], vocab_size: int, tokenizer: str | None) -> Loaded:
    """Load one token file or any number of text files."""
    if all(path.suffix != ".bin" for path in paths):
        files, texts = [], dict[Path, Source]()
        for path in paths:  # one after the other: there may be more than a process can have open
            files.append(file := File(path))
            if (text := _read_text(file)).size:
                texts[path] = text
        if not texts:
            raise UserError(f"{name!r} is empty; expected text")
        absolute = [os.path.abspath(path) for path in texts]
        root = os.path.commonpath([os.path.dirname(path) for path in absolute])
        names = (path[len(root) :].lstrip(os.sep).replace(os.sep, "/") for path in absolute)
        named = dict(zip(names, texts.values(), strict=True))
        first, *others = map(str, texts)
        source = f"{len(texts)} texts from {first!r} on" if others else f"text {first!r}"
        if rows := [path for path in texts if path.suffix.lower() == ".txt" and begins_with_example(path)]:
            source += f"; {str(rows[0])!r} begins as examples do; with a name in .jsonl they are read"
        tokenizer = tokenizer or "bytes"
        return source, tokenizer, split_texts(_encoded(named, tokenizer)), tuple(files)
    if len(paths) > 1:
        raise UserError(
            f"{name!r} matches {len(paths)} files, among them token files (.bin); expected one NAME_train.bin, "
            "beside which NAME_val.bin is found by itself"
        )
    (path,) = paths
    tokens, file = open_tokens(path)
    tokenizer = tokenizer or usual_tokenizer(vocab_size)  # a token file does not say what made it
    if sibling := held_out_beside(path):
        val, other = open_tokens(sibling)
        return f"token files {str(path)!r} and {sibling.name!r}", tokenizer, (tokens, val), (file, other)
    return f"token file {str(path)!r}, its last tenth for validation", tokenizer, _split(tokens), (file,)


CONTROL = bytes(c for c in range(32) if chr(c) not in "\b\t\n\v\f\r\x1b")
"""Bytes that text does not have, as in the program `file`."""


def _read_text(file: File) -> Source:
    """Read a text file, after a check of its content."""
    path, text = file.path, tokens_of(file, np.dtype(np.uint8))
    beginning = text[:65536].tobytes()
    control = len(beginning) - len(beginning.translate(None, CONTROL))
    if control > 0.02 * len(beginning) or b"\0" in beginning:
        raise UserError(
            f"{str(path)!r} is not text: its first {len(beginning)} bytes hold {control} control characters; "
            "expected UTF-8 text (decompress or convert it), or an llm.c token file named .bin"
        )
    for start in range(0, text.size, PIECE):
        if (zeros := np.flatnonzero(text[start : start + PIECE] == 0)).size:
            raise UserError(
                f"{str(path)!r} is not text: byte {start + zeros[0]} is NUL; expected UTF-8 text, or an llm.c token "
                "file named .bin; was it cut short and filled up?"
            )
    return text


PIECE = 1 << 24
"""Bytes that are searched at a time."""


BY_FILE = 100
"""From this many texts on, whole files are validation; of fewer, the last tenth of each."""


def split_texts(texts: Mapping[str, Source]) -> tuple[Source, Source]:
    """Join texts into one to train on and one to validate on.

    A file's side depends on its name alone, so that adding or removing a file moves no other; one name in 12 validates.
    """
    if len(texts) < BY_FILE:
        parts = [_split(text) for text in texts.values()]
        return _join([train for train, _ in parts]), _join([val for _, val in parts])
    held_out = {name for name in texts if crc32(name.encode(errors="surrogateescape")) % 12 == 0}
    return (
        _join([text for name, text in texts.items() if name not in held_out]),
        _join([text for name, text in texts.items() if name in held_out]),
    )


def _split(tokens: Source) -> tuple[Source, Source]:
    """Hold out the last tenth, where nanoGPT cuts too."""
    cut = int(tokens.size * 0.9)
    if isinstance(tokens, FileTokens):
        return tokens.part(0, cut), tokens.part(cut, tokens.size)
    return tokens[:cut], tokens[cut:]


def _join(parts: list[Source]) -> Source:
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *(part[:] for part in parts)])


NOT_BUILTIN = [
    *["test", "tests", "__pycache__", "site-packages", "dist-packages"],
    # Of the machine rather than of Python; then what some distributions leave out or add.
    *["_sysconfigdata*", "config-*", "*customize.py"],
    *["tkinter", "turtle*", "idlelib", "distutils", "_distutils*", "lib2to3", "ensurepip", "macholib"],
    # Generated tables: a megabyte of code points teaches nothing.
    *["encodings", "pydoc_data", "entities.py"],
]
"""Folders of the standard library that are left out, so that one version of Python gives one corpus."""


def _builtin() -> tuple[str, dict[str, Source]]:
    """Read the source of the running Python's standard library, a text that each machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = re.compile("|".join(map(translate, NOT_BUILTIN))).match
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not skip(name)]
        found += [Path(folder, name) for name in files if name.endswith(".py") and not skip(name)]
    version = ".".join(map(str, sys.version_info[:3]))
    if len(found) < BY_FILE:
        raise UserError(
            f"builtin: {str(root)!r} has {len(found)} source files; expected {BY_FILE} at least, because builtin is "
            f"the source of Python {version}'s standard library, which this Python lacks; name a text: --data FILE"
        )
    names = sorted((path.relative_to(root).as_posix(), path) for path in found)
    # Windows has the same files with other line ends.
    texts: dict[str, Source] = {}
    for name, path in names:
        content = tokens_of(File(path), np.dtype(np.uint8))[:].tobytes()
        texts[name] = np.frombuffer(content.replace(b"\r\n", b"\n"), np.uint8)
    return f"{len(texts)} source files of Python {version}'s standard library", texts

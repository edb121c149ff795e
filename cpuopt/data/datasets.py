"""Datasets by name: the registry, and `prepare`, the one function of cpuopt that uses the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..files import write_whole
from ..wording import nearest
from .tokenizers import (
    GPT2_VOCABULARY,
    TOKENIZERS,
    Published,
    data_directory,
    get_tokenizer,
    vocabulary_places,
)
from .tokens import write_tokens

Progress = Callable[[str, int, int], None]
"""Called while a file downloads, with its URL, the bytes so far and the bytes in all."""


@dataclass(frozen=True)
class Dataset:
    """A published text and its division.

    Parameters
    ----------
    what : one line for a list.
    text : the file; UTF-8.
    stem : llm.c's name of its token files: ``<stem>_train.bin`` and ``<stem>_val.bin``.
    documents : function that cuts the text into the parts that <|endoftext|> separates.
    val_tokens : as many of the first tokens are validation.
    """

    what: str
    text: Published
    stem: str
    documents: Callable[[str], list[str]]
    val_tokens: int


def _blank_line_sections(text: str) -> list[str]:
    """Cut after each blank line: a speech of a play."""
    *sections, last = text.split("\n\n")
    return [*(section + "\n\n" for section in sections), last]


DATASETS = {
    # Cut and split as llm.c's dev/data/tinyshakespeare.py does: 305,260 tokens to train on.
    "tinyshakespeare": Dataset(
        what="40,000 lines of Shakespeare's plays, 1.1 MB (Karpathy, char-rnn)",
        text=Published(
            url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            size=1_115_394,
            sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        ),
        stem="tiny_shakespeare",
        documents=_blank_line_sections,
        val_tokens=32_768,
    ),
}


def dataset_files(name: str, tokenizer: str, directory: Path | None = None) -> list[Path]:
    """Return the paths of a prepared dataset, existing or not: the text for ``bytes``, else the two token files."""
    folder = (directory or data_directory()) / name
    if tokenizer == "bytes":
        return [folder / "input.txt"]
    return [folder / f"{DATASETS[name].stem}_{split}.bin" for split in ("train", "val")]


def prepare_command(name: str, tokenizer: str) -> str:
    """Return the command line that prepares a dataset."""
    return f"cpuopt data prepare {name} --tokenizer {tokenizer}"


def prepare(
    name: str, tokenizer: str, *, directory: Path | None = None, progress: Progress | None = None
) -> list[Path]:
    """Download and tokenize a dataset; files that are already whole are not downloaded again.

    Parameters
    ----------
    name
        A key of ``DATASETS``.
    tokenizer
        ``gpt2``, or ``bytes``, which needs the text alone.
    directory
        Where datasets live; by default `data_directory()`. gpt2's vocabulary file has its own `vocabulary_places()`.
    progress
        Called during each download.

    Returns
    -------
    list of Path
        The files that `load_corpus` will read.

    Raises
    ------
    UserError
        For an unknown name; if a download fails or differs from its checksum, saying which file to put where.
    """
    if name not in DATASETS:
        raise UserError(f"unknown dataset {name!r}; {nearest(name, DATASETS)}")
    if tokenizer not in TOKENIZERS:
        raise UserError(f"unknown tokenizer {tokenizer!r}; expected one of {', '.join(TOKENIZERS)}")
    dataset = DATASETS[name]
    (text_path,) = dataset_files(name, "bytes", directory)
    needed = [(dataset.text, text_path)]
    if tokenizer == "gpt2" and not any(GPT2_VOCABULARY.is_at(place) for place in vocabulary_places()):
        needed.append((GPT2_VOCABULARY, vocabulary_places()[0]))
    missing = [(file, path) for file, path in needed if not file.is_at(path)]
    for n in range(len(missing)):
        _fetch(missing[n:], progress)

    files = dataset_files(name, tokenizer, directory)
    if tokenizer != "bytes":
        encoder = get_tokenizer(tokenizer)
        tokens: list[int] = []
        for document in dataset.documents(text_path.read_text(encoding="utf-8")):
            tokens += [encoder.eot, *encoder.encode(document)]
        train, val = files
        write_tokens(val, tokens[: dataset.val_tokens])
        write_tokens(train, tokens[dataset.val_tokens :])
    return files


def _fetch(missing: list[tuple[Published, Path]], progress: Progress | None) -> None:
    """Download the first of the missing files; if that fails, the error names them all."""
    from http.client import HTTPException
    from urllib.request import urlopen

    file, path = missing[0]
    by_hand = "; ".join(f"put at {str(path)!r} by hand {file}" for file, path in missing)
    content = bytearray()
    try:
        with urlopen(file.url, timeout=30) as response:
            while len(content) <= file.size and (chunk := response.read(1 << 16)):
                content += chunk
                if progress:
                    progress(file.url, len(content), file.size)
    except (OSError, HTTPException) as e:
        reason = " ".join(str(e).split()) or type(e).__name__
        raise UserError(f"cannot download {file.url} ({reason}); {by_hand}; then repeat the command") from e
    if not file.matches(content):
        raise UserError(
            f"{file.url} gave {len(content)} bytes that are not the expected file, and were not kept; "
            f"{by_hand}; then repeat the command"
        )
    write_whole(path, [content])


@dataclass(frozen=True)
class DatasetStatus:
    """A row of ``cpuopt data list``.

    Attributes
    ----------
    name, what, tokenizer : the dataset's name, description and tokenizer.
    files : its prepared files; none if it is not prepared, or needs no file.
    nbytes : the size of those files.
    prepared : whether `load_corpus` can use it now.
    command : the command that prepares it; empty if there is nothing to do.
    """

    name: str
    what: str
    tokenizer: str
    files: tuple[Path, ...]
    nbytes: int
    prepared: bool
    command: str


def list_datasets(directory: Path | None = None) -> list[DatasetStatus]:
    """List the datasets that `load_corpus` knows by name, prepared or not."""
    rows = [DatasetStatus("builtin", "the source of Python's standard library", "bytes", (), 0, True, "")]
    for name, dataset in DATASETS.items():
        for tokenizer in TOKENIZERS:
            files = tuple(dataset_files(name, tokenizer, directory))
            prepared = all(path.is_file() for path in files)
            files = files if prepared else ()
            nbytes = sum(path.stat().st_size for path in files)
            command = prepare_command(name, tokenizer)
            rows.append(DatasetStatus(name, dataset.what, tokenizer, files, nbytes, prepared, command))
    return rows

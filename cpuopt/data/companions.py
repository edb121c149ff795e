"""The files that travel with a tokenizer, in one list; what they say of its special tokens, and their chat templates.

Source: ``transformers``, ``tokenization_utils_base.py`` and ``generation/configuration_utils.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files.reading import parse_json, read_file

CONFIG, GENERATION = "config.json", "generation_config.json"
SETTINGS, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"
MODEL = "tokenizer.model"
COMPANIONS = (SETTINGS, SPECIAL, GENERATION, TEMPLATE, ADDED, "vocab.json", "merges.txt", MODEL)
"""The files that go where a tokenizer's file goes, with those in `TEMPLATES`, a folder of further templates."""
READ = (SETTINGS, SPECIAL, GENERATION, CONFIG, TEMPLATE)
"""The files that a tokenizer is read with."""
LARGEST = 16 << 20
"""Bytes of one of them."""


@dataclass(frozen=True)
class Marks:
    """The ids that begin, end and fill up a text, if a model's files name them."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None

    def ids(self) -> dict[str, Any]:
        """Return them as ``config.json`` and ``generation_config.json`` have them."""
        if self == Marks():
            return {}
        eos = self.eos[0] if len(self.eos) == 1 else list(self.eos) or None
        return {"bos_token_id": self.bos, "eos_token_id": eos} | (
            {} if self.pad is None else {"pad_token_id": self.pad}
        )


def beside(path: Path, names: Iterable[str] = READ, most: int = LARGEST) -> dict[str, bytes]:
    """Return the contents of files beside a tokenizer's file, with all templates, by their names.

    Parameters
    ----------
    most : the largest size of one in bytes.

    Raises
    ------
    UserError
        If one cannot be read.
    """
    folder = path.parent
    places = [place for name in names if (place := folder / name) != path and place.is_file()]
    found: dict[str, bytes] = {}
    for place in (*places, *templates_in(folder)):
        try:
            found[place.relative_to(folder).as_posix()] = read_file(place, most=most)
        except (OSError, ValueError) as e:
            raise UserError(f"cannot read {str(place)!r}: {getattr(e, 'strerror', None) or e}") from e
    return found


def travelling(path: Path) -> dict[str, bytes]:
    """Return the contents of the companions of a tokenizer's file, by their names.

    Without a ``generation_config.json``, one is made of the ids in ``config.json``, which does not travel.
    """
    found, config = beside(path, COMPANIONS, 4 * LARGEST), beside(path, [CONFIG]).get(CONFIG)
    if config is None or GENERATION in found:
        return found
    place = path.with_name(CONFIG)
    ids = marks_of({place: read_table(place, config)}).ids()
    return found | ({GENERATION: json.dumps(ids, indent=2).encode()} if ids else {})


def templates_in(folder: Path) -> list[Path]:
    """Return the further templates beside a tokenizer's file."""
    return sorted(place for place in (folder / TEMPLATES).glob("*.jinja") if place.is_file())


def read_table(path: Path, content: bytes) -> dict[str, Any]:
    """Read a JSON object.

    Raises
    ------
    UserError
        If it is none.
    """
    try:
        return parse_json(content)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{str(path)!r} is no JSON object: {e}") from e


def marks_of(tables: Mapping[Path, Mapping[str, Any]]) -> Marks:
    """Return the marks that ``generation_config.json`` and ``config.json`` name, the earlier file first.

    Raises
    ------
    UserError
        For what is no id.
    """
    found: dict[str, list[int]] = {"bos": [], "eos": [], "pad": []}
    for path, table in tables.items():
        for what, ids in found.items():
            x = table.get(f"{what}_token_id")
            more = x if isinstance(x, list) and what == "eos" else [] if x is None else [x]
            if what == "pad" and x == -1:  # as some files say that there is none
                continue
            if not all(type(i) is int and i >= 0 for i in more):
                raise UserError(f"{str(path)!r}: {what}_token_id is {repr(x)[:60]}; expected a token's id, or null")
            ids += more
    bos, pad = (next(iter(found[what]), None) for what in ("bos", "pad"))
    return Marks(bos, tuple(dict.fromkeys(found["eos"])), pad)


def special_texts(folder: Path, files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the texts of special tokens by what they are for, such as ``bos_token``; those that are null are left out.

    Raises
    ------
    UserError
        For a file that is no JSON object, or a text that is none.
    """
    found: dict[str, Any] = {}
    for name in (SPECIAL, SETTINGS):
        table = read_table(folder / name, files[name]) if name in files else {}
        for key in (f"{what}_token" for what in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")):
            x = table.get(key, found.get(key))
            text = x.get("content") if isinstance(x, dict) else x
            if not isinstance(text, str | None):
                raise UserError(f"{str(folder / name)!r}: {key} is {repr(x)[:60]}; expected a token's text, or null")
            found[key] = text
    return {key: text for key, text in found.items() if text}


def settings(folder: Path, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the content of ``tokenizer_config.json``."""
    return read_table(folder / SETTINGS, files[SETTINGS]) if SETTINGS in files else {}


def added_texts(folder: Path, files: Mapping[str, bytes]) -> dict[int, str]:
    """Return the texts of tokens that files add to a ``tokenizer.model``, by their ids.

    Raises
    ------
    UserError
        For what is no id, or no text.
    """
    older = read_table(folder / ADDED, files[ADDED]) if ADDED in files else {}
    newer = settings(folder, files).get("added_tokens_decoder") or {}
    pairs: list[tuple[Any, Any]] = [(i, text) for text, i in older.items()]
    for i, token in newer.items() if isinstance(newer, dict) else [(newer, None)]:
        pairs.append((int(i) if str(i).isdecimal() else i, token.get("content") if isinstance(token, dict) else None))
    for i, text in pairs:
        if type(i) is not int or i < 0 or not isinstance(text, str):
            raise UserError(f"{str(folder)!r} adds the token {repr(text)[:60]} with the id {repr(i)[:60]}")
    return dict(pairs)


def chat_templates(folder: Path, files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the chat templates by their names, of which the usual one is called ``default``.

    Those in files of their own replace those in ``tokenizer_config.json``.

    Raises
    ------
    UserError
        For what is no template.
    """
    places = {name: Path(name).stem for name in files if Path(name).parent.name == TEMPLATES}
    places |= {TEMPLATE: "default"} if TEMPLATE in files else {}
    try:
        if places:
            return {name: files[place].decode() for place, name in places.items()}
    except UnicodeDecodeError as e:
        raise UserError(f"the chat template of {str(folder)!r} is no UTF-8: {e}") from e
    x = settings(folder, files).get("chat_template")
    listed = [{"name": "default", "template": x}] if isinstance(x, str) else x or []
    if not isinstance(listed, list) or not all(isinstance(t, dict) and _texts(t, "name", "template") for t in listed):
        raise UserError(
            f"{str(folder / SETTINGS)!r}: chat_template is {repr(x)[:60]}; expected a text, or a list of names and "
            "templates"
        )
    return {t["name"]: t["template"] for t in listed}


def _texts(table: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(table.get(name), str) for name in names)

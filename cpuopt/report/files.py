"""Files of JSON that other programs read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import write_whole


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as strict JSON: valid UTF-8, without lone surrogates, and no NaN.

    Raises
    ------
    UserError
        If it cannot be written.
    """
    write_whole(path, [json.dumps(content, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")])

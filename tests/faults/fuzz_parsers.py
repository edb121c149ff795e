"""Fuzz every parser of files with coverage as the guide: atheris, which is libFuzzer for Python.

::

    python tests/faults/fuzz_parsers.py FOLDER [-max_total_time=3600]      # needs: pip install atheris

FOLDER keeps the corpus. A parser may read a file or refuse it with a ``UserError`` of a readable length; anything else
is a finding, and ends the run. The first byte chooses the parser: the formats of ``test_hostile_files.py``, and JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (1, 2)]

with atheris.instrument_imports(include=["cpuopt", "json", "tomllib"]):
    from test_hostile_files import Format, formats

    from cpuopt.errors import UserError
    from cpuopt.models import read_config
    from cpuopt.train.settings import read as read_settings
    from cpuopt.weights import huggingface

SIZES = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 4, "vocab_size": 5, "n_positions": 3}
TEXTS = [
    Format("config.json", json.dumps(SIZES).encode(), read_config),
    Format("i.index.json", b'{"weight_map":{"a.weight":"x.safetensors"}}', huggingface._shards),
    Format("settings.toml", b'lr = 3e-4\nmodel = "gpt2-tiny"\nswap = []\n', read_settings),
    Format("settings.json", b'{"lr": 3e-4, "model": "gpt2-tiny", "swap": []}', read_settings),
]


def main(folder: Path) -> None:
    """Start the corpus with files that are right, and fuzz."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(tempfile.mkdtemp())
    known = [f for name, f in formats().items() if name != "tokenizer in GGUF"]  # which reads only what weights allow
    known += TEXTS
    for number, (name, content, _) in enumerate(known):
        (folder / f"seed-{number}").write_bytes(bytes([number]) + content)
        Path(name).write_bytes(content)

    def one(data: bytes) -> None:
        """Give one input to one parser."""
        if len(data) < 2:
            return
        name, _, read = known[data[0] % len(known)]
        (path := Path(name)).write_bytes(data[1:])
        try:
            read(path)
        except UserError as e:
            if len(str(e)) > 2000:
                raise ValueError("an error of more than 2000 characters") from e

    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

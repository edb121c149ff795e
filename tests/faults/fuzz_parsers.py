"""Fuzz every parser of files with coverage as the guide: atheris, which is libFuzzer for Python.

::

    python tests/faults/fuzz_parsers.py FOLDER [-max_total_time=3600]      # needs: pip install atheris

FOLDER keeps the corpus. A parser may read a file or refuse it with a ``UserError`` of a readable length; anything else
is a finding, and ends the run. The first byte chooses the parser.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path

import atheris
import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (1, 2)]

with atheris.instrument_imports(include=["cpuopt", "json", "tomllib"]):
    from golden.llama2c import tokenizer_bin

    from cpuopt.data.tokenizers import get_tokenizer
    from cpuopt.data.tokens import read_tokens
    from cpuopt.errors import UserError
    from cpuopt.train.evaluate import read_examples
    from cpuopt.train.settings import read as read_config
    from cpuopt.weights import huggingface, llama2c, llmc
    from cpuopt.weights.tensors import TensorFile, file_parts

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FOLDER = Path(tempfile.mkdtemp())


def tensors(path: Path) -> None:
    """Read a safetensors file."""
    file = TensorFile(path)
    for name, t in file.tensors.items():
        if t.dtype in ("F32", "F16", "BF16"):
            assert file.read(name).shape == t.shape


def model(path: Path) -> None:
    """Read an llm.c model."""
    found = llmc.open_model(path)
    for name, shape in found.config.shapes().items():
        assert found.read(name).shape == shape


def directory(path: Path) -> None:
    """Read a Hugging Face directory whose config is the input."""
    (path.parent / "config.json").write_bytes(path.read_bytes())
    huggingface.open_model(path.parent / "model.safetensors")


def index(path: Path) -> None:
    """Read an index of shards."""
    target = path.with_name("model.safetensors.index.json")
    target.write_bytes(path.read_bytes())
    huggingface._shards(target)


def choices(path: Path) -> None:
    """Read an evaluation file."""
    for e in read_examples(path, 256):
        assert max(int(x.max()) for x in (e.context, *e.completions)) < 256


def tokens(path: Path) -> None:
    """Read a token file."""
    assert read_tokens(path).size > 0


def config(path: Path) -> None:
    """Read a file of settings, as TOML and as JSON."""
    for name in ("c.toml", "c.json"):
        target = path.with_name(name)
        target.write_bytes(path.read_bytes())
        with contextlib.suppress(UserError):
            read_config(target)


def llama(path: Path) -> None:
    """Read a llama2.c model."""
    found = llama2c.open_model(path)
    for name, shape in found.config.shapes().items():
        assert found.read(name).shape == shape


def pieces(path: Path) -> None:
    """Read a llama2.c tokenizer."""
    found = get_tokenizer(str(path))
    assert b"".join(map(found.token_bytes, found.encode("any text"))) == b" any text"


PARSERS = (tensors, model, directory, index, choices, tokens, config, llama, pieces)


def one(data: bytes) -> None:
    """Give one input to one parser."""
    if len(data) < 2:
        return
    path = FOLDER / "input.bin"
    path.write_bytes(data[1:])
    try:
        PARSERS[data[0] % len(PARSERS)](path)
    except UserError as e:
        if len(str(e)) > 2000:
            raise ValueError("an error of more than 2000 characters") from e


def seeds(folder: Path) -> None:
    """Start the corpus with files that are right."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {"a": (2, 3), "b.weight": (4,)}
    right = b"".join(bytes(p) for p in file_parts(shapes, lambda n: np.ones(shapes[n], np.float32)))
    evaluation = np.zeros(256, "<i4")
    evaluation[:3] = 20240522, 1, 1
    words = [65535, 40, 0, 1, 4, 3, 5, 6, 7, 1, 9, 2, 9, 8, 1, 7, 3, 1, 2, 3]
    text = np.zeros(256, "<i4")
    text[:3] = 20240520, 1, 4
    sizes = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 4, "vocab_size": 5, "n_positions": 3}
    for number, content in enumerate(
        [
            right,
            (GOLDEN / "llmc.bin").read_bytes(),
            json.dumps(sizes).encode(),
            b'{"weight_map":{"a":"model.safetensors","b.weight":"model.safetensors"}}',
            evaluation.tobytes() + np.array(words, "<u2").tobytes(),
            text.tobytes() + b"\1\0\2\0\3\0\4\0",
            b'lr = 3e-4\nmodel = "gpt2-tiny"\nswap = []\n',
            np.array([2, 1, 1, 1, 1, 1, 1], "<i4").tobytes() + bytes(4 * (2 + 2 + 4 * 4 + 2 + 3 * 2 + 2 + 2)),
            tokenizer_bin(300),
        ]
    ):
        (folder / f"seed-{number}").write_bytes(bytes([number]) + content)
    (FOLDER / "model.safetensors").write_bytes(right)


if __name__ == "__main__":
    seeds(Path(sys.argv[1]))
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()

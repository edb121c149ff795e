"""Compare greedy text with llama2.c's ``run.c``, the reference program, which is built here from a path that you give.

::

    python tests/golden/compare_run_c.py PATH/run.c [--cc gcc]

A model of the sizes of stories260K with random weights goes to a file of version 0, once with a tied head and once with
a head of its own; ``run.c`` and ``cpuopt generate`` go on with the same prompts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from llama2c import draw, model_bin, tokenizer_bin

STEPS = 60
PROMPTS = ("", "Once there was a red hen", " on  the sea.\n\u20ac")


def printed(ids: list[int], pieces: list[bytes]) -> bytes:
    """Return what ``run.c`` prints for ids behind 1: until 1 comes again, no single byte that cannot be seen."""
    text, before = b"", 1
    for i in ids:
        if i == 1:
            break
        piece = pieces[i].removeprefix(b" ") if before == 1 else pieces[i]
        seen = len(piece) != 1 or 0x20 <= piece[0] < 0x7F or piece in b"\t\n\v\f\r"
        text += piece if seen and piece != b"\0" else b""
        before = i
    return text


def main() -> int:
    """Build, generate, compare, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, help="run.c of llama2.c")
    parser.add_argument("--cc", default="gcc", help="C compiler (%(default)s)")
    args = parser.parse_args()
    from cpuopt import models
    from cpuopt.data.tokenizers import get_tokenizer

    wrong = 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        subprocess.run([args.cc, "-O2", "-o", folder / "run", args.source, "-lm"], check=True)
        (folder / "tokenizer.bin").write_bytes(tokenizer_bin(512))
        tokenizer = get_tokenizer(str(folder / "tokenizer.bin"))
        pieces = [tokenizer.token_bytes(i) for i in range(512)]
        for tied in (True, False):
            config = replace(models.parse("stories260K"), tie_word_embeddings=tied)
            (model := folder / f"tied-{tied}.bin").write_bytes(model_bin(config, draw(config.shapes(), seed=7)))
            for prompt in PROMPTS:
                start = tokenizer.start(prompt)
                flags = ["-t", "0", "-n", str(STEPS), "-z", folder / "tokenizer.bin", "-i", prompt]
                done = subprocess.run([folder / "run", model, *flags], capture_output=True, check=True)
                theirs = done.stdout.removesuffix(b"\n")
                command = [sys.executable, "-m", "cpuopt", "generate", "--init", model, "--prompt", prompt, "--json"]
                command += ["--temperature", "0", "--max-tokens", str(STEPS + 1 - len(start))]
                done = subprocess.run(command, capture_output=True, check=True)
                ours = printed([*start[1:], *json.loads(done.stdout)["ids"]], pieces)
                wrong += (other := ours != theirs)
                what = f"tied {tied}, prompt {prompt!r}"
                print(f"{what}: {len(theirs)} bytes {f'{theirs!r}, and here {ours!r}' if other else 'equal'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""The code of README, CONTRIBUTING and docs/: blocks of Python run, and each command has flags and names that exist."""

import importlib
import re
import shlex
import sys
import types
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from test_links import PAGES, ROOT

from cpuopt import cli, models, nn, ops
from cpuopt import functional as F
from cpuopt.errors import UserError
from cpuopt.kernels import registry
from cpuopt.kernels.toolkit import regions
from cpuopt.lab.commits import KernelSource
from cpuopt.models import is_own
from cpuopt.ops.declaration import Op
from cpuopt.program import fuse

BLOCK, INLINE = re.compile(r"(?ms)^```(\w*)\n(.*?)^```$"), re.compile(r"(?<!`)`(cpuopt\s[^`]+)`(?!`)")
PRELUDE = """import numpy as np
import cpuopt
from cpuopt import Engine, kernel, nn, ops
from cpuopt import functional as F
"""
SOURCE = "".join(re.sub(r"(?m)^ +", "", file.read_text()) for file in sorted((ROOT / "cpuopt").rglob("*.py")))


class MLP(nn.Module):
    def __init__(self):
        self.out, self.loss = nn.Linear(2, 2), nn.CrossEntropyLoss()

    def forward(self, x, y):
        return self.loss(self.out(F.gelu(x)), y)


GIVEN = {
    "OF_A_PAGE": True,
    "MLP": MLP,
    "f": np.sum,
    "g": np.cumsum,
    "args": [np.ones(9)],
    "inputs": {"x": ((512, 2), "float32"), "y": ((512,), "int32")},
    "x": np.ones((512, 2), np.float32),
    "y": np.zeros(512, np.int32),
    **dict(zip(("BT", "OC", "C"), (2, 3, 4), strict=True)),
    **dict(zip(("inp", "weight", "out"), map(np.ones, [(2, 4), (3, 4), (2, 3)]), strict=True)),
}
"""What blocks use that the text around them describes."""


@pytest.fixture(autouse=True)
def _as_before(tmp_path, measured, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(regions, "watch", lambda: None)  # too late in a process that has kernels
    models.load_all()
    tables = (ops.ALL, registry.KERNELS, models.MODELS, models.PRESETS)
    before = [dict(table) for table in tables]
    yield
    for table, was in zip(tables, before, strict=True):
        for key in table.keys() - was.keys():
            del table[key]
    for name in [name for name, module in sys.modules.items() if vars(module).get("OF_A_PAGE")]:
        del sys.modules[name]


def blocks(page, language):
    """The blocks of a page in a language, each with the text before it."""
    text = page.read_text(encoding="utf-8")
    return [(text[: m.start()], m[2]) for m in BLOCK.finditer(text) if m[1] == language]


def quoted(text):
    """Return whether a block is a part of the package's source."""
    return re.sub(r"(?m)^ +", "", text) in SOURCE


def run(before, text):
    """Run a block: as the module of the package that the text before it names last, else as a file of its own."""
    named = re.search(r"`cpuopt/([\w/]+)\.py`:\s*$", before)
    name = f"cpuopt.{named[1].replace('/', '.')}" if named else re.findall(r"(?m)^(?:def|class) (\w+)|\Z", text)[0]
    file = Path(f"{name or 'block'}.py")
    file.write_text(text if named else PRELUDE + text)
    importlib.invalidate_caches()
    for key in [key for key, k in registry.KERNELS.items() if k.file == str(file.resolve())]:
        del registry.KERNELS[key]  # an earlier form of this kernel
    module = sys.modules[name or "block"] = types.ModuleType(name or "block")
    module.__dict__.update({"__package__": name.rpartition(".")[0], "OF_A_PAGE": True} if named else GIVEN)
    exec(compile(file.read_text(), str(file.resolve()), "exec"), module.__dict__)
    for op in vars(module).values() if named else ():
        if isinstance(op, Op):
            ops.ALL.setdefault(op.name, op)  # as if its file were in the folder
    return module


def commands(page):
    """The command lines of a page, as words from the verb on, and for each whether it stands in a block."""
    text, found = page.read_text(encoding="utf-8"), []
    for m in BLOCK.finditer(text):
        lines = iter(m[2].splitlines() if m[1] in ("", "bash") else ())
        for line in lines:
            if command := re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ |(?:mpiexec|srun) .*?(?<= ))*cpuopt (.*)", line):
                words = command[1]
                while words.endswith("\\") or words.partition(" # ")[0].count("'") % 2:
                    words = f"{words.removesuffix(chr(92))} {next(lines)}"
                found.append((shlex.split(words, comments=True), True))
    found += [(shlex.split(m[1])[1:], False) for m in INLINE.finditer(BLOCK.sub("", text))]
    return [(list(takewhile(lambda word: word != "|" and word[:2] != "$(", words)), whole) for words, whole in found]


def trouble(words, capsys, whole=True, begun=()):
    """What a command names that is not there: a verb, a flag, an op, a variant or a model; else an empty text.

    Of the ops in `begun`, `new-kernel` has written the variant ``mine``.
    """
    parser, _ = cli._parser()
    try:
        args, left = parser.parse_known_args(words)
    except SystemExit:
        said = capsys.readouterr().err
        return "" if not said or (not whole and re.search("are required|expected one argument", said)) else said
    if left:
        return f"left over: {left}"
    asked, variant, swaps = (getattr(args, name, None) for name in ("op", "variant", "swap"))
    named = [asked] if isinstance(asked, str) else asked or []
    for pattern in named:
        if not pattern.isupper() and not any(registry.op_matches(op, pattern) for op in [*ops.ALL, *ops.OPTIMIZERS]):
            return f"no op {pattern!r}"
    known = {v for op, v in registry.KERNELS if not named or any(registry.op_matches(op, p) for p in named)}
    known |= {"mine"} if {*named} & {*begun} else set()
    sides = [KernelSource.of(getattr(args, side, "A"), {"main", "HEAD"}) for side in "ab"]
    several = [*(variant if isinstance(variant, list) else []), *(side.variant for side in sides if not side.file)]
    if wrong := [v for v in several if not v.isupper() and v not in known]:
        return f"{named} has no variant {wrong}"
    try:
        if (isinstance(variant, str) and args.verb != "new-kernel") or swaps:
            registry.Choice(variant or "vanilla", swaps or ())
        if (model := getattr(args, "model", None)) and not is_own(model):
            models.parse(model)
    except UserError as e:
        return str(e)
    rewrites = set(fuse.parse(getattr(args, "fuse", "none"))) - {*fuse.FUSIONS, "auto"}
    return f"no such rewrite: {rewrites}" if rewrites else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page(page, capsys):
    for before, text in blocks(page, "python"):
        if not quoted(text) and page.name != "api.md":  # whose recipes test_api runs, one after the other
            run(before, text)
    begun = [op for words, _ in commands(page) if words[0] == "new-kernel" for op in words[1:2]]
    found = [(words, trouble(words, capsys, whole, begun)) for words, whole in commands(page)]
    assert [x for x in found if x[1]] == []


def test_there_are_commands_and_blocks_to_try():
    assert sum(whole for page in PAGES for _, whole in commands(page)) > 60
    assert sum(len(blocks(page, "python")) for page in PAGES) > 20


CHANGED = re.compile(r"`([\w/]+\.(?:py|md))`")


def test_a_change_that_contributing_shows_fits_the_files():
    """What stands around it, and what goes, is in a file that is named before; or the change is made already."""
    ((before, text),) = blocks(ROOT / "CONTRIBUTING.md", "diff")
    files = [ROOT / name for name in CHANGED.findall(before[-3000:])]
    lines = {line.strip() for file in files if file.exists() for line in file.read_text().splitlines()}
    made = all(line[1:].strip() in lines for line in text.splitlines() if line.startswith("+"))
    assert made or [x for x in text.splitlines() if x[0] in " -" and x[1:].strip() not in lines] == []

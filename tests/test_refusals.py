"""A table of faults: a command, what is wrong, the one line that says so, and the status; nothing is written."""

import itertools
import os
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from test_hostile_records import NASTY
from verbs import SQUARES, process, ran

from cpuopt import cli, ops
from cpuopt.data.tokens import write_tokens
from cpuopt.engine import Engine
from cpuopt.kernels import registry
from cpuopt.program import arena
from cpuopt.program.fuse import FUSIONS
from cpuopt.train import record, settings

HEAD = "from cpuopt import kernel, ops\n"
NAMES = {
    "JOB": "--model gpt2-tiny --data text.txt -B 2 -T 16 --steps 2",
    "OWN": "--kernels mine.py --swap gelu_forward@h.1.mlp=mine",
    "GELU": "@kernel(ops.gelu_forward, 'mine', jit=False)\ndef gelu_forward",
    "COMPILED": "@kernel(ops.gelu_forward, 'mine')\ndef gelu_forward",
    "VANILLA": "@kernel(ops.gelu_forward, 'vanilla', jit=False)\ndef gelu_forward",
    "WRONG": "^gelu_forward[mine] is wrong, so nothing is run with it: ",
    "HUB": "if it is on the Hugging Face Hub, first run: hf download org/model-1B --local-dir model-1B",
    "LFS": "it is a pointer of Git LFS in place of the file; run 'git lfs pull'",
    "POINTER": "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 109552\n",
    "LISTING": "kernels --kernels mine.py",
    "MISSING": "no kernel is registered under it",
    "ELSEWHERE": "; name a directory that can be written with --runs DIR$",
    "PAIRS": "gelu_forward optimized vanilla --model gpt2-tiny",
    "TUNE": "--model gpt2-tiny -B 1 -T 8",
    "BENCH": "--model gpt2-tiny --against vanilla --sizes 1x8",
    "FUSIONS": ", ".join(FUSIONS),
    "OPS": str(len(ops.ALL)),
    "BIG": "1" + "0" * 400,
}
"""What words of capitals stand for in the table."""
TABLE = r"""
train JOB <-B -T --steps --threads> <0 -4> | | ^<1> <2>: expected 1 or more
train JOB <-B --steps --threads> 100000000000000000000000 | | ^<1> 100000000000000000000000: expected 1 or more, up to
train JOB --threads <0 -1 4097> | | ^--threads <1>: expected 1 or more, up to 4,096
train JOB --seed <-1 9223372036854775808> | | ^--seed <1>: expected 0 or more, below 2**63
train JOB --lr <0.0 -0.1 nan inf> | | ^--lr <1>: expected a positive number
train JOB <--beta1 --beta2> <1.0 -0.1 nan> | | ^<1> <2>: expected 0 or more, and less
train JOB -T 65 | | ^-T 65: gpt2-tiny has a context of 64 tokens; take -T 64 or less

train JOB --model gpt2-tinny | | --model 'gpt2-tinny': no such preset; did you mean 'gpt2-tiny'?
train JOB --model '{"n_layer": 2' | | not JSON (Expecting ',' delimiter
train JOB --model '{"\u001b[31m": 1}' | | unknown size
train JOB --model '{"n_embd": 65, "n_head": 2}' | | model: n_embd = 65 is not a multiple of n_head = 2
train JOB --model '{"n_layer": 0}' | | model: n_layer is 0; expected a whole number from 1 to 4096
train JOB --model '{"n_embd": 2147483648}' | | n_embd is 2147483648; expected a whole number from 1 to 2147483647
train JOB --model '{"vocab_size": null}' | | vocab_size is None
train JOB --model '{"n_layer": 1, "block_size": 8}' | | -T 16: gpt2-custom has a context of 8 tokens
train JOB --model '{"model": "llama", "rope_factor": 8.0}' | |
  rope_factor is 8.0; rope_type = 'default' does not read it

train JOB --config a.toml | a.toml: lr = BIG | lr is 1000000
train JOB --config a.toml | a.toml: lr = '''\n\x1b[31m''' | expected TOML
train JOB --config a.toml | a.toml: lrr = 0.1 | unknown 'lrr'; did you mean 'lr'?
train JOB --config a.json | a.json: {"lr": 1, "lr": 2} | 'lr' comes twice
train JOB --config a.json | a.json: {"lr": {"a": 1}} | lr is {'a': 1}; expected a number
train JOB --config a.json | a.json: [] | it is a list
train JOB --config a.toml | a.toml: local-steps = 2 | local_steps 2: this version has none; leave it out
train JOB --config a.toml | a.toml: swap = [1] | swap[0] is 1; expected a text
train JOB --config a.toml | a.toml: overfit = 1 | overfit is 1; expected true or false
train JOB --schedule wsd --steps <9 1> | |
  ^--schedule wsd: the last fifth of <1> steps is too short to decay; take 10 or more, or linear$
train JOB --schedule wsd --steps 20 --warmup-steps 17 | | 17: expected 16 at most, behind which wsd decays
train JOB --total-batch <33554464 33554465 BIG> | |
  ^--total-batch <1>: expected 33554432 or less, 1,048,576 micro-batches
train --dry-run --resume | | --dry-run: plans a new run
train JOB -T 8 --sample-every 1 --prompt BIG | | do not fit in the context of 64
train JOB --config a.toml | a.toml: warmup_steps = 2 | --warmup-steps 2: expected less than the 2 steps
train JOB --config <nowhere.toml .> | | --config
train JOB --dtype bf61 | | --dtype 'bf61': expected one of float32, bf16, int8; did you mean 'bf16'?
train JOB --weights bf16 | | --weights bf16: products read them so with --dtype bf16 or int8 alone
train JOB --model llama-tiny --base int8 | | --base int8: all weights are trained; add --lora r=8, or --freeze
train JOB --model llama-tiny --base bf16 --lora r=2 | | --base bf16: products read it with --dtype bf16 alone
train JOB --model llama-tiny --base int4 --lora r=2 | | --base 'int4': expected one of bf16, int8
train JOB --model llama-tiny --base int8 --freeze *embed* | | base 'int8': no product inside a block
train JOB --momentum 0.5 | | --momentum 0.5: adamw has no momentum; it has --lr, --beta1, --beta2, --eps, --weight-d
train JOB --optimizer lyon | | --optimizer 'lyon': there is no such; did you mean 'lion'?
bench --model gpt2-tiny --weights bf16 --against vanilla | | beside vanilla read float32
bench BENCH --sizes=<4 4x x64 0x64 4x0 -1x4 4x64, 4x64x2 axb 4x٣ 1x99999999> | | ^--sizes '<1>': '…' is no size
bench BENCH --sizes 1x65 | | --sizes 1x65: gpt2-tiny has a context of 64
bench BENCH --rounds 1 | | --rounds 1: expected 2 or more
bench --peer fast | | --peer fast: expected one of torch-eager, …, torch-bf16, each also with -tuned …, or torch-best
bench BENCH --moments half | | --moments 'half': expected one of float32, bf16
bench BENCH --out none/x.json | | --out none/x.json: cannot be written
generate | | either --init
train JOB --ranks 0 | | --ranks 0: expected 1 or more
train JOB --elastic | | --elastic: expected
generate --init model --model gpt2-tiny | | either --init
scale --project 1,16 | | --project 1: one thread
scale --project many | | --project 'many': expected numbers
scale --threads 0 | | --threads '0': expected numbers
scale --steps 2 | | --steps 2: expected 3 or more
scale <--caches~2 --nodes~0~--project~4 --caches~5~--project~4> | |
  expected 1 or more, up to the largest number of threads in --project
scale --bandwidth 0 | | --bandwidth 0: expected GB/s
ab gelu_forward optimized vanilla --sizes=<N=0 N=-3 N=x =3 4x64= N=3,C=4,N=5 ,> | | ^--sizes …
sweep gelu_forward --threads 1 | | --over is missing
sweep gelu_forward --threads 1 --over N=4 --over N=8 | | expected each symbol once
sweep gelu_forward --threads 1 --over N=4 --variants optimised | | 'optimised'; did you mean 'optimized'?
sweep gelu_forward --threads 1 --over BT=4 | | --over BT: gelu_forward has the symbols N
inspect gelu vanilla | | inspect 'gelu': no such op
inspect gelu_forward vanila | | inspect: gelu_forward has no variant 'vanila'; did you mean 'vanilla'?
inspect gelu_forward vanilla optimized blas | | inspect: 3 variants; expected one or two
inspect gelu_forward vanilla --parallel 7 | | --parallel 7: expected 1 to 4

prfile | | ^'prfile': no such verb; did you mean 'profile'?$
train --stpes 5 | | unrecognized argument '--stpes'; did you mean '--steps'?; see 'cpuopt train -h'
runs list --jsno | | unrecognized argument '--jsno'; did you mean '--json'?
runs lst | | 'lst' is none of list, show, compare, history; did you mean 'list'?
train --schedule cosin | | one of constant, cosine, linear, wsd; did you mean 'cosine'?
new-kernel gelu | | 'gelu': no such op; the nearest of OPS: gelu_forward, gelu_backward, …
inspect <nope xyz> vanilla | | '<1>': no such op; none of OPS names is like it; 'cpuopt kernels' lists
kernels gelo | | kernels 'gelo': no op matches; did you mean 'gelu'?
lab gelu --limit <0 nan> | | --limit: '<1>': expected a positive number
check gleu | | check 'gleu': no op matches; did you mean 'gelu'?
check --variant optimised | | --variant 'optimised'
check gelu --variant blas | | no kernel is both one of ['gelu'] and of variant ['blas']
judge | | judge: nothing given; expected one of FILE, --serve, --mcp, --tasks and --board
judge --tasks --serve | | judge: serve and tasks given; expected one of
judge x.py | | judge x.py: add --op OP
judge x.py --op gelu_forward | | judge x.py: No such file or directory; expected the text of a kernel
judge --tasks --adopt fast | | --adopt fast: add --board OP
judge --board gelu_forward --time | | --time: add --tasks
judge x.py --op gelu_forward --html x | | --html x: add --board OP for its board, or --tasks
judge x.py --op gelu_forward --check --in-step | | --in-step: needs a FILE that is timed
judge --board gelu | | 'gelu': no such op
check --plan --gradient | | --plan with --gradient: gradients have no list of cases; give one of the two

train JOB --data a.txt | a.txt: | 'a.txt' is empty; expected text
train JOB --data a.bin | a.bin: | token file 'a.bin': has 0 bytes; expected a header of 1024
train JOB --data a.txt | a.txt: ten bytes. | a.txt (train): has 9 tokens; a batch of B = 2 rows of T = 16 needs 33
train JOB --data a.txt | a.txt: \0\0\0\0 | 'a.txt' is not text
train JOB --data tetx.txt | | there is no data 'tetx.txt', nearest are 'text.txt'
train JOB --data *.md | | no file matches '*.md'
train JOB --data . | | '.' is a directory
train JOB --data '' | | there is no data ''
train JOB --data a.jsonl --chat-format a | a.jsonl: {"text": ""} | ^--chat-format 'a': expected chatml or llama3
train JOB --chat-format chatml | | ^--chat-format: --data text.txt is text, without examples; leave it out

train JOB --variant vanila | | variant 'vanila': MISSING; did you mean 'vanilla'?
train JOB --swap gelo=vanilla | | swap 'gelo=vanilla': no op matches 'gelo'
train JOB --swap gelu@h.2.*=vanilla | | no layer of the model with gelu matches 'h.2.*'
train JOB --swap softmax=vanilla | | this model does not use 'softmax'
train JOB --swap gelu=blas | | gelu_forward has no variant 'blas'; known: …
train JOB --swap <gelu gelu= =vanilla gelu@=vanilla @h.0=vanilla> | | swap '<1>': expected OP[@LAYER]=VARIANT
train JOB --fuse residual,updat | | fuse 'updat': no such rewrite; did you mean 'update'?
train JOB --clip 1 --fuse <update all> | | fuse without 'update'
train JOB --kernels <none.py .> | | --kernels <1>: no such file
train JOB --kernels text.txt | | --kernels text.txt: not a Python file
check gelu_forward --kernels loop.py | a link to itself | ^--kernels loop.py: …

LOADING | mine.py: 1 / 0 | --kernels mine.py: line 2 raised ZeroDivisionError: division by zero | 1
LISTING | mine.py: \n\ndef broken(:\n    pass | line 4 raised SyntaxError: … | 1
LISTING | mine.py: import no_such_module | line 2 raised ModuleNotFoundError: No module named 'no_such_module' | 1
LOADING | mine.py: raise ValueError('one\\ntwo') | line 2 raised ValueError: one two | 1
LOADING | mine.py: raise SystemExit(0) | ^--kernels mine.py: line 2 raised SystemExit: 0 | 1
LISTING | mine.py: @kernel('gelu_forward', 'mine')\ndef f(out, inp): pass |
  @kernel('gelu_forward', ...): expected an op | 1
LISTING | mine.py: GELU(inp, out): 0 |
  are (inp, out); the declaration says otherwise: write def gelu_forward(out, inp) | 1
LOADING | mine.py: GELU(out, inp): 0\nGELU(out, inp): 0 | [mine]: registered a second time | 1
LISTING | mine.py: VANILLA(out, inp): pass | gelu_forward[vanilla]: registered a second time | 1
<train profile> JOB OWN | mine.py: import numpy as np\nGELU(out, inp): out[...] = inp / (1 + np.exp(-1.702 * inp)) |
  WRONG…out[…] = …, expected | 1
train JOB OWN | mine.py: GELU(out, inp): out[...] = float('nan') | WRONG…out[0] = nan, expected | 1
train JOB OWN | mine.py: GELU(out, inp): out[1:] = 0 |
  WRONG…out[0] = nan, expected …: as filled before the call | 1
train JOB OWN | mine.py: GELU(out, inp): inp[0] = 1 | WRONG…changed 'inp', which it may only read | 1
train JOB OWN | mine.py: GELU(out, inp): raise ValueError('not today') |
  WRONG…raised ValueError: not today | 1
train JOB OWN | mine.py: COMPILED(out, inp): out[0] = inp[0] + 'x' |
  ^gelu_forward[mine] at /…/mine.py:2 does not compile: … | 1

train JOB --run=<../x /etc/x a/../b a/b .. . .hidden a..b -rf _a a;b $HOME a* ü 名> | |
  ^--run '<1>': expected up to 64 letters, digits, '.', '_' or '-'
train JOB --runs <text.txt text.txt/runs /proc/none/runs> | | --runs <1>: …
<train~JOB profile~JOB ab~PAIRS tune~TUNE bench~BENCH> --runs text.txt/runs | nothing measures |
  ^--runs text.txt/runs: Not a directoryELSEWHERE
<train~JOB profile~JOB ab~PAIRS tune~TUNE bench~BENCH> --runs /proc/none/runs | nothing measures |
  ^--runs /proc/none/runs: No such file or directoryELSEWHERE
profile JOB --trace <none/trace.json folder text.txt/trace.json .> | a folder | --trace <1>: cannot be written
train JOB --save <text.txt/model text.txt/none/model.bin> | | nothing can be written to
data tokenize text.txt <'' . /> | | expected the beginning of a file's name

train JOB --data tokens.bin | 7 bytes less | 'tokens.bin': has 2017 bytes; expected 2024, because byte 8 says 500 tokens
train JOB --data tokens.bin | the number 20240326 |
  byte 0, the magic number, is 20240326, an llm.c GPT-2 model; expected 20240520
train JOB --data tokens.bin | 4 bytes | has 4 bytes; expected a header of 1024
train JOB --data tokens.bin --steps 110 | <256~in~training 256~in~validation 256~that~is~not~needed> |
  is 256; expected 0 to 255, because the model's
convert <m.gguf m.bin> out | <1>: POINTER | '<1>'…LFS
data tokenize <a.txt t_train.bin> out | <1>: POINTER | '<1>'…LFS
data tokenize builtin out --tokenizer <tokenizer.model> | <1>: POINTER | '<1>'…LFS
data show <a.jsonl> | <1>: POINTER | '<1>'…LFS
<generate~--init train~--model> org/model-1B | | HUB
convert org/model-1B out | | HUB

train --model gpt2-tiny | NUMBA_DISABLE_JIT=1 | ^NUMBA_DISABLE_JIT…unset it
train --model gpt2-tiny | <NUMBA_THREADING_LAYER=foo NUMBA_THREADING_LAYER=> | ^NUMBA_THREADING_LAYER…unset it
<train profile> JOB | 1 MB of memory | and 1.00 MB of memory are available; no B and T fit: try a smaller --model$
profile | an allocation that fails | ^out of memory: Unable to allocate 49.1 MiB$ | 1
train JOB | 600 MB of addresses |
  ^this process may have 600 MB of address space: compiled kernels need 1000 MB or more; raise 'ulimit -v'$
train JOB | no /proc | ^/proc/none is not mounted, and only it tells how much memory is free
check residual --quick --variant vanilla | no temporary folder | set TMPDIR to another
"""
"""Commands, the fault (a file and its content, a variable, one of `FAULTS`), the line with ``…`` for anything, and the
status if it is not 2. A row is one for each of the words in ``<>`` of the command or fault, with a space for ``~``;
other columns call the word ``<1>``, that of a second ``<>`` ``<2>``."""


def setting(name, value):
    return lambda patch: patch.setattr(name, value)


def failing(name, error=AssertionError):
    def fails(*args, **more):
        raise error

    return setting(name, fails)


def tokens(change=bytes, n=500, at=slice(0)):
    """A token file of counting ids, with 256 at some places, and its bytes changed."""

    def write(patch):
        ids = np.arange(n) % 256
        ids[at] = 256
        write_tokens(file := Path("tokens.bin"), ids)
        file.write_bytes(change(file.read_bytes()))

    return write


MEASURES = "train.job.prepare isolate.child.Child.ask lab.tune.survey lab.peers.Bench.run"
FAULTS = {
    "": lambda patch: None,
    "a folder": lambda patch: Path("folder").mkdir(),
    "a path that is not UTF-8": lambda patch: (os.mkdir(os.path.dirname(OTHER)), Path(OTHER).write_text(HEAD)),
    "a link to itself": lambda patch: os.symlink("loop.py", "loop.py"),
    "nothing measures": lambda patch: [failing(f"cpuopt.{name}")(patch) for name in MEASURES.split()],
    "7 bytes less": tokens(lambda content: content[:-7]),
    "the number 20240326": tokens(lambda content: (20240326).to_bytes(4, "little") + content[4:]),
    "4 bytes": tokens(lambda content: b"\x7fELF"),
    "256 in training": tokens(n=4000, at=3000),
    "256 in validation": tokens(n=4000, at=3610),
    "256 that is not needed": tokens(n=4000, at=3990),
    "1 MB of memory": setting("cpuopt.program.arena.available_bytes", lambda: 1_000_000),
    "an allocation that fails": failing("cpuopt.cli.profile.run", MemoryError("Unable to allocate\n49.1 MiB")),
    "600 MB of addresses": setting("resource.getrlimit", lambda kind: (600_000_000, -1)),
    "no /proc": setting("cpuopt.machine.PROC", Path("/proc/none")),
    "no temporary folder": lambda patch: (
        patch.setattr("tempfile.tempdir", None),
        failing("tempfile._get_default_tempdir", FileNotFoundError(2, "No usable temporary directory found in"))(patch),
    ),
}
OTHER, TRAIN = os.fsdecode(b"folder\xff/k\xff.py"), ["train", *NAMES["JOB"].split()]
DEEP = ('{"n_layer":' * 100_000, '{"n_layer": ' + "[" * 200 + "]" * 200 + "}")
NOT_UTF8 = "a path that is not UTF-8", "numba compiles no file whose path is not UTF-8…rename it"
COMPILING = [
    *("check --quick", f"train {NAMES['JOB']} --swap residual_forward=mine", "inspect residual_forward mine"),
    *("ab residual_forward vanilla mine --rounds 6", "new-kernel gelu_forward"),
]
STRANGE = NASTY.replace("\ud800", "")
ROWS = [
    *(([*TRAIN, "--model", model], "", "nested more than") for model in DEEP),
    *(([*TRAIN, "--model", model], "", "not JSON") for model in ('{"n_layer": ' + "1" * 5000 + "}", "{" * 10_000)),
    ([*TRAIN, "--config", "a.toml"], f"a.toml: x = {'[' * 50_000}", "expected TOML"),
    ([*TRAIN, "--config", "a.json"], "a.json: " + '{"lr":' * 10_000, "nested more than"),
    *(
        ([*TRAIN, f"--run={name}"], "", f"^--run {name!r}: expected up to 64 letters, digits, '.', '_' or '-'")
        for name in ("", "~", "a\\b", "a b", "a\nb", "a\n", "a\u202eb", "a\x1b[2J", "a\0b", "x" * 65, "x" * 300)
    ),
    *(([*words.split(), STRANGE], "", "") for words in ("runs show", "runs history", "profile --program --model", "")),
    *(([*words.split(), "--kernels", OTHER], *NOT_UTF8) for words in COMPILING),
]
"""The rows that are no text."""


def rows():
    """Yield the rows: a command, its fault, its line, the status; ``LOADING`` is both verbs that load kernels."""
    for row in TABLE.replace("\n  ", " ").replace("LOADING", "<train~JOB kernels> --kernels mine.py").split("\n"):
        sets = re.findall(r"<(?!\d>)(.*?)>", " | ".join(row.split(" | ")[:2]))
        for words in itertools.product(*map(str.split, sets)) if row else ():
            text = row
            for n, (each, word) in enumerate(zip(sets, words, strict=True), 1):
                text = text.replace(f"<{each}>", word.replace("~", " ")).replace(f"<{n}>", word)
            for name, meaning in NAMES.items():
                text = text.replace(name, meaning)
            command, fault, line, *status = re.split(r" *\| +", text)
            yield command, fault, line, int(*status or "2")
    yield from ((*row, 2) for row in ROWS)


@pytest.fixture(autouse=True)
def _here(here, measured, monkeypatch):
    """Run in a folder with one text."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))  # a busy machine is worth a line of its own
    Path("text.txt").write_text(SQUARES)


@pytest.fixture
def told(capsys):
    """Run a command that fails without writing anything; give its line."""

    def content():
        return {path: path.is_file() and path.read_bytes() for path in Path.cwd().rglob("*")}

    def told(command, status=2):
        before = content()
        try:
            found = cli.main(shlex.split(command) if isinstance(command, str) else command)
        except SystemExit as e:
            found = e.code
        assert content() == before
        out, err = capsys.readouterr()
        assert (found, out) == (status, ""), err
        (line,) = (x for x in err.splitlines() if not x.startswith("compiled 0/"))
        assert line.startswith("cpuopt: ")
        assert line.isprintable()
        return line

    return told


def test_the_command_that_others_are_made_from_is_right(capsys):
    assert cli.main(TRAIN) == 0
    assert Path("runs").is_dir()


@pytest.mark.parametrize(
    ("command", "fault", "line", "status"), [*rows()], ids=lambda x: re.sub("[^ -~]", "?", f"{x}")[:60]
)
def test_a_fault_costs_one_line(told, monkeypatch, command, fault, line, status):
    if fault in ("no /proc", "600 MB of addresses") and sys.platform != "linux":
        pytest.skip("it is Linux's")
    if name := re.match(r"[\w.]+(?=:)", fault):
        text = fault[name.end() + 2 :].encode("latin-1").decode("unicode_escape")
        Path(name[0]).write_text((HEAD if name[0] == "mine.py" else "") + text)
    elif re.match(r"\w+=", fault):
        monkeypatch.setenv(*fault.split("="))
    else:
        FAULTS[fault](monkeypatch)
    monkeypatch.setattr(Engine, "step", lambda *args, **more: pytest.fail("a step was made"))
    before, found = registry.KERNELS.copy(), told(command, status)
    wanted = re.escape(line.removeprefix("^").removesuffix("$")).replace("…", ".*")
    assert re.search("^cpuopt: " * line.startswith("^") + wanted + "$" * line.endswith("$"), found), found
    hint, config, sizes = "did you mean" in found or "no such op" in found, "--config" in command, "{" in str(command)
    assert len(found) < (200 if hint else 400 if config else 300 if sizes else 600)
    assert before == registry.KERNELS or (fault[:4] == "mine" and "--swap" in command)


# What is not of one line


def test_a_config_is_still_read():
    Path("a.toml").write_text("lr = 1\nB = 2\nkernels = []\nclip = 1.5\n")
    assert settings.read(Path("a.toml")) == {"lr": 1, "B": 2, "kernels": (), "clip": 1.5}


def test_a_name_whose_folder_is_there_is_not_looked_for_on_the_hub(told):
    Path("org").mkdir()
    assert "Hub" not in told("generate --init org/model-1B")


def test_trying_a_place_for_records_leaves_nothing():
    Path("new").mkdir()
    record.check_root(Path("new/a/b"))
    assert list(Path("new").iterdir()) == []


@pytest.mark.parametrize("there", [2_300_000_000, 2_020_000_000])
def test_too_little_memory_names_sizes_that_fit(told, capsys, monkeypatch, there):
    def arena_bytes(*flags):
        return ran(capsys, "profile", "--program", "--model", "gpt2-124M", *flags)["plan"]["arena"]

    monkeypatch.setattr(arena, "available_bytes", lambda: there)
    monkeypatch.setattr(arena, "Arena", lambda size: pytest.fail("an arena was made"))
    line = told([*TRAIN, "--model", "gpt2-124M", "-B", "32", "-T", "64"])
    needed = arena_bytes("-B", "32", "-T", "64")
    memory = f"cpuopt: the arena needs {needed / 1e9:.2f} GB and {there / 1e9:.2f} GB of memory are available"
    B, T = re.fullmatch(rf"{memory}; try -B (\d+) -T (\d+)", line).groups()
    fits, doubled = (arena_bytes("-B", str(b), "-T", T) for b in (B, 2 * int(B)))
    assert fits <= there < doubled


# In processes of their own, whose state is the fault


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_limit_on_memory_costs_one_line():
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (3 << 30,) * 2)\nfrom cpuopt.cli import main\n"
    job = ["train", "--model", "gpt2-355M", "--data", "text.txt", "-B", "1", "-T", "1"]
    done = process(code=f"{code}sys.exit(main({job}))")
    memory = r"the arena needs \S+ GB and \S+ GB of memory are available; no B and T fit: try a smaller --model"
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(f"cpuopt: {memory}\n", done.stderr)
    assert not Path("runs").exists()


def test_a_threading_layer_that_is_not_installed():
    verbs = ["train --model gpt2-tiny --steps 1", "check gelu --quick", "machine", "kernels --compile"]
    code = "import sys; sys.modules['numba.np.ufunc.tbbpool'] = None; from cpuopt import cli\n"
    code += f"sys.exit(7 if {{cli.main(words.split()) for words in {verbs}}} == {{2}} else 1)"
    asked = "cpuopt: NUMBA_THREADING_LAYER=tbb: its library is not installed; unset it, or take omp or workqueue\n"
    done = process(code=code, NUMBA_THREADING_LAYER="tbb")
    assert (done.returncode, done.stderr) == (7, 4 * asked)

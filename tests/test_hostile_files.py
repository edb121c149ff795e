"""Files of unknown origin in every format: damaged in one place, changed at random, pipes, devices and large ones.

Each is read, or refused in one line that names it, at once and without much memory.
"""

import json
import os
import signal
import struct
import time
import tracemalloc
from contextlib import contextmanager, suppress
from functools import cache
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
from golden.llama2c import draw, model_bin, tokenizer_bin
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_pairs
from verbs import error_of, fails

from cpuopt import kernels, models
from cpuopt.data import companions
from cpuopt.data.tokenizers import get_tokenizer, tokenizer_files
from cpuopt.data.tokens import read_tokens
from cpuopt.errors import UserError
from cpuopt.files import gguf
from cpuopt.models.llama import Config
from cpuopt.train import checkpoint, evaluate
from cpuopt.train import settings as run_settings
from cpuopt.weights import Marks, llama2c, llmc, open_weights, save_weights
from cpuopt.weights.tensors import TensorFile, file_parts

GOLDEN, LLAMA = Path(__file__).parent / "golden", Config(300, 24, 20, 2, 6, 2, 4, 16, tie_word_embeddings=True)


@pytest.fixture(autouse=True)
def _here(here):
    """A folder of its own, and an end to what would wait for ever."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: pytest.fail("it waits"))
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# Formats: a right file of each, and what reads all of it


def model(path):
    weights = open_weights(path)
    assert {name: weights.read(name).shape for name in weights.config.shapes()} == weights.config.shapes()


def tensors(path):
    file = TensorFile(path)
    assert all(file.read(name).shape == t.shape for name, t in file.tensors.items())


def tokens(path):
    assert read_tokens(path).tobytes() == path.read_bytes()[1024:]


def choices(path):
    assert all(x.max() < 256 for e in evaluate.read_examples(path, 256) for x in (e.context, *e.completions))


def tokenizer(path):
    t = get_tokenizer(str(path))
    assert all(t.token_bytes(i) for i in t.encode("hello wörld ﬁ"))


def tokenizer_of(path):
    """Also of one whose weights can be read with another tokenizer."""
    try:
        weights = open_weights(path)
    except UserError as e:
        raise AssertionError from e
    get_tokenizer(str(weights.tokenizer))


def stream(examples):
    """As ``write_evalfile`` of llm.c has it."""
    parts = []
    for number, (label, context, completions) in enumerate(examples):
        body = [65535, 0, number, label, len(completions), len(context), *context]
        for c in completions:
            body += [len(c), *c]
        body[1] = 2 * len(body)
        parts += body
    return np.array(parts, "<u2").tobytes()


def header(*words):
    return np.array([*words, *[0] * (256 - len(words))], "<i4").tobytes()


SHAPES = {"a.weight": (3, 2), "b": (5,), "empty": (0, 4)}
EXAMPLES = [(n % 4, [n, 7, 9, 200, 3], [[1, 2, n], [4], [5, 6, 7, 8, 9, 10, 11], [255, 0, 1, 1]]) for n in range(6)]


@cache
def formats():
    """Return by format: a name, the content of a right file, and a function that reads and checks all of it."""
    byte_pairs("gpt-2").save("tokenizer.json")
    sizes = Config(640, 32, 32, 1, 2, 1, 16, 64, tie_word_embeddings=True)
    how = {"tokenizer": "tokenizer.json", "marks": Marks(1, (2,))}
    save_weights(Path("m.gguf"), sizes, draw(sizes.shapes(), 3).__getitem__, **how)
    small = b"".join(bytes(p) for p in file_parts(SHAPES, lambda n: np.ones(SHAPES[n], np.float32)))
    llamas = [model_bin(LLAMA, draw(LLAMA.shapes(), 1), version) for version in (0, 1)]
    tiny = Config(8, 4, 6, 1, 2, 1, 2, 4, tie_word_embeddings=True)
    save_weights(Path("tiny.gguf"), tiny, draw(tiny.shapes(), 4).__getitem__)
    return {
        "llm.c": ("m.bin", (GOLDEN / "llmc.bin").read_bytes(), model),
        "llama2.c": ("m.bin", llamas[0], model),
        "llama2.c, version 1": ("m.bin", llamas[1], model),
        "safetensors": ("x.safetensors", small, tensors),
        "GGUF": ("m.gguf", Path("tiny.gguf").read_bytes(), model),
        "tokens": ("x.bin", header(20240520, 1, 3) + struct.pack("<3H", 1, 2, 3), tokens),
        "choices": ("x.bin", header(20240522, 1, 6) + stream(EXAMPLES), choices),
        "tokenizer.bin": ("tokenizer.bin", tokenizer_bin(300), tokenizer),
        "tokenizer.json": ("tokenizer.json", Path("tokenizer.json").read_bytes(), tokenizer),
        "bpe": ("tokenizer.model", (GOLDEN / "sentencepiece" / "bpe.model").read_bytes(), tokenizer),
        "unigram": ("tokenizer.model", (GOLDEN / "sentencepiece" / "unigram.model").read_bytes(), tokenizer),
        "tokenizer in GGUF": ("m.gguf", Path("m.gguf").read_bytes(), tokenizer_of),
    }


# What is changed in a right file

HUGE, ENDLESS = 2**63, "its header goes on for 9223372036854775808 bytes"


def put(offset, *values, kind="i"):
    """Replace numbers of a file, one after the other."""

    def change(content):
        struct.pack_into(f"<{len(values)}{kind}", content, offset, *values)
        return content

    return change


def word(place, x):
    """Replace a number of 16 bits behind a header of 1024 bytes."""
    return put(1024 + 2 * place, x, kind="H")


def entry(**more):
    """A safetensors file of one tensor of two numbers, described otherwise; None leaves a key out."""
    about = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **more}
    return safetensors(json.dumps({"a": {k: x for k, x in about.items() if x is not None}}).encode())


def safetensors(head, data=bytes(8)):
    return struct.pack("<Q", len(head)) + head + data


def table(change):
    """Change a file of JSON."""

    def of(content):
        change(found := json.loads(content))
        return json.dumps(found).encode()

    return of


def with_metadata(path, **changes):
    """Return a GGUF file's content with other metadata: a dot is written ``__``, and None leaves a key out."""
    file = gguf.Gguf(path)
    about = file.metadata | {name.replace("__", "."): x for name, x in changes.items()}
    stored = {name: (t.dtype, t.shape) for name, t in file.tensors.items()}
    data = path.read_bytes()[min(t.start for t in file.tensors.values()) :]
    return gguf.header({name: x for name, x in about.items() if x is not None}, stored) + data


def metadata(**changes):
    """Change what a GGUF file says."""

    def of(content):
        (path := Path("before.gguf")).write_bytes(content)
        return bytearray(with_metadata(path, **changes))

    return of


def tokens_of(**changes):
    """Change what a GGUF file says of its tokenizer."""
    return metadata(**{f"tokenizer__ggml__{name}": x for name, x in changes.items()})


def behind(name, offset, codes, *numbers):
    """Write numbers so many bytes behind a key or a name of GGUF; its length stands 8 bytes before it."""

    def change(content):
        at = content.index(struct.pack("<Q", len(name)) + name) + 8
        struct.pack_into(f"<{codes}", content, at + len(name) + offset, *numbers)
        return content

    return change


def renamed(old, new):
    """Give a key or a tensor of GGUF another name of any length."""
    lengths = struct.Struct("<Q").pack
    return lambda c: c.replace(lengths(len(old)) + old, lengths(len(new)) + new, 1)


def each(words, *changes):
    return [(change, words) for change in changes]


KIND, LAYERS, NORM = b"general.type", b"llama.block_count", b"output_norm.weight"
E1 = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
SIZE, SCORE = "bytes; expected", struct.Struct("<fi").pack
CASES = {
    "llm.c": [
        (put(0, 20240520), "llm.c's tokens"),
        *((put(0, 7), "magic number, is 7"), (put(4, 1), "version, is 1"), (put(4, 5), "expected 18560")),
        *each("impossible", put(8, -1), put(28, 60)),
        *each("cut short", put(16, 2**20), put(24, 2**20)),
        *each(SIZE, put(16, 3), lambda c: c[:-1], lambda c: c + b"x"),
        (put(20, 3), "multiple"),
        *each("header alone", lambda c: c[:500], b""),
        *each("pickle", b"\x80\x04cbuiltins\nprint\n.", lambda c: b"PK\3\4" + c),
    ],
    "llama2.c": [
        (put(0, 32), "magic number, is 32"),  # 6 heads do not divide it: no sizes of llama2.c
        *each(SIZE, put(0, 48), put(20, -300), put(24, 2**20), lambda c: c[:-1], lambda c: c + b"x"),
        *each("cut short", lambda c: put(0, 2**20)(put(12, 2**10)(c)), put(8, 4096), lambda c: c[:100]),
        *each("header alone", lambda c: c[:27], b""),
    ],
    "llama2.c, version 1": [
        *((lambda c: c[:200], "expected a header of 256"), (lambda c: c[:-4], SIZE)),
        (put(4, 2), "is 2, int8 numbers; expected 1"),
        *((put(36, 7, kind="B"), "head is shared, is 7"), (put(8, *[0] * 7), "impossible sizes")),
    ],
    "safetensors": [
        *each("", b"", b"\1\0\0", struct.pack("<Q", 100) + b"{}", struct.pack("<Q", HUGE) + b"{}"),
        *each("", safetensors(b"{'a'}"), safetensors(b'{"\xff":1}'), safetensors(b"[" * 100_000)),
        *each("", safetensors(b'{"a":' + b"9" * 10_000 + b"}"), safetensors(f'{{"a":{E1},"a":{E1}}}'.encode())),
        *each("", safetensors(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}')),
        *each("", safetensors(b'{"\\u001b[2J":%s}' % E1.encode()), safetensors(f'{{"{"a" * 201}":{E1}}}'.encode())),
        *each("", entry(data_offsets=None), entry(x=1), entry(dtype="F33"), entry(shape=[-2])),
        *each("", entry(shape=[0, 10**18], data_offsets=[0, 0]), entry(data_offsets=[8, 0])),
        *each("", safetensors(f'{{"a":{E1},"b":{E1}}}'.encode())),  # an overlap
        *each("", entry(shape=[4], data_offsets=[0, 16])),
        *each("", safetensors(f'{{"__metadata__":{{"a":{{}}}},"a":{E1}}}'.encode())),
        (struct.pack("<Q", 5 << 20) + bytes(6 << 20), "header of 5242880 bytes; expected 4194304"),
    ],
    "GGUF": [
        *((b"", "its header goes on"), (lambda c: b"GGML" + c[4:], "begins with b'GGML'")),
        *((put(4, 1), "version 1; expected 2 or 3"), (put(4, 3 << 24), "big-endian")),
        (put(8, HUGE, kind="Q"), "keys; expected 65536 at most"),
        *each("give a whole GGUF file", put(16, 60000, kind="Q"), behind(KIND, 0, "IIQ", 9, 8, HUGE)),
        *each(ENDLESS, behind(KIND, -len(KIND) - 8, "Q", HUGE), behind(KIND, 4, "Q", HUGE)),
        *each(ENDLESS, behind(KIND, 0, "IIQ", 9, 0, HUGE)),
        (behind(KIND, -2, "2B", 0xFF, 0xFE), "a key is no UTF-8"),
        (behind(KIND, 12, "B", 0xFF), "'general.type' is no UTF-8"),
        (renamed(KIND, b"\x1b[2J"), r"the key '\x1b[2J'"),
        (renamed(KIND, b"llama.block_count"), "'llama.block_count' twice"),
        (behind(LAYERS, 0, "I", 13), "'llama.block_count' has the type 13; known"),
        (behind(LAYERS, 0, "IB", 7, 2), "neither 0 nor 1"),
        (behind(KIND, 0, "IIQ", 9, 10, 2**61), f"its header goes on for {2**64} bytes"),
        (behind(KIND, 0, "IIQ", 9, 9, 2), "an array in an array"),
        (metadata(general__alignment=0), "general.alignment is 0; expected a power of two"),
        (metadata(general__alignment="32"), "alignment is 32"),
        *each("bytes from", metadata(general__alignment=64), behind(NORM, 16, "Q", 4)),
        (renamed(NORM, b"token_embd.weight"), "has the tensor 'token_embd.weight' twice"),
        *((renamed(NORM, b"a" * 64), "has a tensor named"), (renamed(NORM, b"a b"), "has a tensor named 'a b'")),
        (behind(NORM, 0, "I", 0), "has 0 dimensions; expected 1 to 4"),
        *((behind(NORM, 4, "Q", 0), "has the shape (0,)"), (behind(NORM, 16, "Q", 0), "overlap")),
        *each("has the shape", behind(NORM, 4, "Q", HUGE), metadata(llama__embedding_length=8)),
        (behind(NORM, 12, "I", 99), "has numbers of type 99; known: F32, F16"),
        (behind(NORM, 12, "I", 8), "has rows of 4; expected a multiple of 32 for Q8_0"),
        *each("the file has", behind(NORM, 16, "Q", 1 << 40), lambda c: c[:-40]),
        (metadata(general__architecture="rwkv\n7"), r"'rwkv\n7'"),
        (metadata(llama__block_count=np.zeros(0, "<u4")), "llama.block_count is a list"),
        (metadata(llama__attention__head_count=np.array([2, 1], "<u4")), "is a list"),
        (metadata(llama__block_count=0), "num_hidden_layers is 0"),
        (metadata(llama__block_count=2**32 - 1), "block_count is 4294967295; there are 11 tensors"),
        (metadata(llama__block_count=11), "lacks 'blk.1.attn_k.weight'"),
        (metadata(llama__attention__head_count=0), "num_attention_heads is 0"),
        (metadata(llama__attention__layer_norm_rms_epsilon=nan), "rms_norm_eps is nan"),
        (metadata(llama__block_count="1"), "is '1'"),
        (metadata(llama__expert_count=8), "llama.expert_count is 8, which cpuopt does not compute"),
        (metadata(llama__rope__scaling__type="yarn"), "rope_type 'yarn'"),
        (metadata(llama__rope__scaling__factor=nan), "rope_factor is nan"),
        (metadata(llama__rope__scaling__attn_factor=2.0), "attn_factor is 2.0, which cpuopt does"),
        (metadata(llama__rope__dimension_count=1), "rope.dimension_count is 1; expected 2"),
        (renamed(NORM, b"output_gate.weight"), "has 'output_gate.weight' and 0 more"),
        (metadata(tokenizer__ggml__eos_token_id=8), "expected an id below 8"),
        (metadata(split__count=3), "one of 3 files of a model"),
    ],
    "tokens": [
        (put(0, 20240801), "byte 4, the version, is 1; expected 7"),
        (put(0, 20240801, 7), "has 1030 bytes; expected 1036, because byte 8 says 3 tokens of 4 bytes"),
        (put(0, 20240326), "the magic number, is 20240326, an llm.c GPT-2 model; expected 20240520"),
        (put(0, 0), "byte 0, the magic number, is 0; expected 20240520"),
        (put(8, 0), "byte 8, the number of tokens, is 0"),
        (put(8, 4), "has 1030 bytes; expected 1032, because byte 8 says 4 tokens"),
        (put(8, 2**31 - 1), "has 1030 bytes; expected 4294968318"),
        (lambda c: c[:1023], "has 1023 bytes; expected a header of 1024"),
        (lambda c: c[:-1], "has 1029 bytes; expected 1030"),
    ],
    "choices": [
        *((word(*at), "") for at in ((0, 1), (1, 13), (1, 10), (1, 65534), (2, 1), (3, 4), (4, 3), (4, 5), (5, 60000))),
        *((word(*at), "") for at in ((5, 0), (6, 256), (11, 0))),
        *each("", lambda c: c + b"\xff\xff", lambda c: c[:-2], lambda c: c[:1030], lambda c: c[:1024] + b"\1\0"),
        *each("", b"", b"x" * 100, put(0, 20240520)),
    ],
    "tokenizer.bin": [
        *((b"", "is 0; expected 1 to 65536"), (put(0, 0), "longest piece, is 0")),
        *((put(0, 2), "has 5 bytes; expected 1 to 2"), (lambda c: c[:-1], "bytes; expected 1 to")),
        (lambda c: c + b"x", "is cut short"),
        *((lambda c, n=n: c + SCORE(0.0, n), f"has {n} bytes") for n in (2**31 - 1, -5)),
        *((lambda c, x=x: c + SCORE(x, 1) + b"x", f"has the score {x}") for x in (nan, inf)),
        *each("pieces 3 to 258", lambda c: c[:4], lambda c: c.replace(b"<0x41>", b"<0x42>")),
    ],
    "tokenizer.json": [
        *each("", b"", lambda c: c[:-10], b"{'a'}", lambda c: c[:-1] + b',"\xff":1}', b"{}"),
        *each("", b'{"decoder":' + b"[" * 100_000),
        *each("", lambda c: b'{"decoder":null,' + c[1:].strip()[:-1] + b',"version":"1.0"}'),
        *each("", table(lambda t: t["decoder"].update(type="WordPiece")), table(lambda t: t.update(decoder=None))),
        *each("", table(lambda t: (t["model"].update(vocab={}, merges=[]), t.update(added_tokens=[])))),
        *each("", table(lambda t: t.update(decoder="\x1b[2J")), table(lambda t: t["model"].update(type="Nothing"))),
        *each("", *(table(lambda t, n=n: t["model"]["vocab"].update(zz=n)) for n in (2**40, -1))),
        *each("", table(lambda t: t["model"]["merges"].append(["\x1b[2J", "q"]))),
    ],
    "bpe": [
        *each("", b"", b"pieces\n", b"version https://git-lfs.github.com/spec/v1\n"),
        (b"\x08" + b"\xff" * 12, ""),  # a number without an end
        (b"\x08\x01", ""),  # a piece that is a number
        (b"\x0a\x02\x18\x01", ""),  # one without a text
        (b"\x0a\xff\xff\xff\xff\x7f", ""),  # a length beyond all
    ],
    "tokenizer in GGUF": [
        (tokens_of(model="t5"), "a tokenizer of the kind 't5'; expected gpt2 or llama"),
        *each("tokens is no list of texts", tokens_of(tokens=[]), tokens_of(tokens=np.zeros(640, np.int32))),
        (tokens_of(token_type=np.ones(639, np.int32)), "token_type is no list of 640 numbers"),
        (tokens_of(pre="mine\n"), "cuts text as 'mine\\n', which cpuopt does not; known: gpt-2"),
        (tokens_of(merges=["a"]), "merges is no list of two tokens"),
        (tokens_of(merges=["zzz yyy"]), "is no tokenizer.json that can be read"),
        (tokens_of(model="llama"), "scores are no numbers"),
        (tokens_of(model="llama", scores=np.full(640, nan, "<f4")), "scores are no numbers"),
        (tokens_of(model="llama", unknown_token_id=640), "expected an id below 640"),
    ],
}
"""Of each format: contents, or what is changed in a right file, and words of the line that refuses it."""


@contextmanager
def taking(most):
    """No more memory than that many bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("name", "case"), [(name, n) for name, cases in CASES.items() for n in range(len(cases))])
def test_a_damaged_file_is_refused_in_one_line_at_once(name, case):
    (file, right, read), (change, words) = formats()[name], CASES[name][case]
    path = Path(file)
    path.write_bytes(right)
    read(path)  # what the case changes is all that is wrong
    path.write_bytes(change(bytearray(right)) if callable(change) else change)
    began = time.monotonic()
    with taking(16 << 20):
        said = error_of(read, path)
    assert time.monotonic() - began < 5
    assert all(x in said for x in (words, file))
    assert len(said) < 600


NO_TEXT = [name for name in (*CASES, "unigram") if name not in ("tokenizer.json", "tokenizer in GGUF")]


@pytest.mark.parametrize("name", NO_TEXT)
def test_no_change_to_a_file_does_more_than_be_refused(name, tmp_path):
    file, right, read = formats()[name]
    near = min(len(right), 1200)

    @given(st.binary(max_size=40), st.integers(0, near), st.none() | st.integers(0, near) | st.integers(0, len(right)))
    @settings(max_examples=150)
    def check(noise, at, size):
        content = bytearray(right)
        content[at : at + len(noise)] = noise
        Path(file).write_bytes(content[:size])
        with suppress(UserError):
            read(Path(file))

    check()


# What is no file of usual size

READERS = {
    "config.json": models.read_config,
    "model.safetensors.index.json": open_weights,
    "model.safetensors": TensorFile,
    "gpt2.bin": llmc.open_model,
    "llama.bin": llama2c.open_model,
    **dict.fromkeys(("tokenizer.json", "tokenizer.bin", "tokenizer.model"), lambda p: get_tokenizer(str(p))),
    "tokenizer_copy.json": lambda p: tokenizer_files(str(p)),
    "tokens.bin": read_tokens,
    "choices.bin": lambda p: evaluate.read_examples(p, 256),
    **dict.fromkeys(("settings.toml", "settings.json"), run_settings.read),
    "mine.py": lambda p: kernels.load_all([p]),
    **dict.fromkeys((checkpoint.MANIFEST, checkpoint.STATE), lambda p: checkpoint.newest(Path("run"))),
}


def device(path):
    path.symlink_to("/dev/zero")


def gigabyte(path):
    path.touch()
    os.truncate(path, 1 << 30)


@pytest.mark.parametrize("make", [os.mkfifo, device, Path.mkdir, gigabyte])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_of_usual_size_is_refused_at_once(name, make):
    path = Path(name)
    if name.endswith(".index.json"):
        Path("config.json").write_text(json.dumps(models.parse("llama-tiny").to_transformers()))
    if name in (checkpoint.MANIFEST, checkpoint.STATE):
        path = Path("run/checkpoints/step-00000001", name)
        path.parent.mkdir(parents=True)
    make(path)
    began = time.monotonic()
    assert name in error_of(READERS[name], path) or "tokenizer" in name or path.parts[0] == "run"
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", [*companions.READ, f"{companions.TEMPLATES}/a.jinja"])
def test_a_companion_of_a_gigabyte_is_refused(name):
    Path(name).parent.mkdir(exist_ok=True)
    gigabyte(Path(name))
    fails(f"cannot read '{name}': it is no file of at most 16 MB", companions.beside, Path("tokenizer.json"))

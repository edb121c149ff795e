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
from typing import NamedTuple

import numpy as np
import pytest
from golden.llama2c import draw, model_bin, tokenizer_bin
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_pairs
from verbs import refused

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

GOLDEN = Path(__file__).parent / "golden"
LLAMA = Config(300, 24, 20, 2, 6, 2, 4, 16, tie_word_embeddings=True)


@pytest.fixture(autouse=True)
def _here(here):
    """A folder of its own, and an end to what would wait for ever."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: pytest.fail("it waits"))
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# Formats: a right file of each, and what reads all of it


class Format(NamedTuple):
    """A name, the content of a right file, and a function that reads it and checks what it has read."""

    name: str
    content: bytes
    read: object


def model(path):
    weights = open_weights(path)
    assert {name: weights.read(name).shape for name in weights.config.shapes()} == weights.config.shapes()


def tensors(path):
    file = TensorFile(path)
    for name, t in file.tensors.items():
        assert file.read(name).shape == t.shape


def tokens(path):
    found = read_tokens(path)
    assert found.tobytes() == path.read_bytes()[1024:]


def choices(path):
    for e in evaluate.read_examples(path, 256):
        assert max(x.max() for x in (e.context, *e.completions)) < 256


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
    """Return the formats by name."""
    byte_pairs("gpt-2").save("tokenizer.json")
    sizes = Config(640, 32, 32, 1, 2, 1, 16, 64, tie_word_embeddings=True)
    how = {"tokenizer": "tokenizer.json", "marks": Marks(1, (2,))}
    save_weights(Path("m.gguf"), sizes, draw(sizes.shapes(), 3).__getitem__, **how)
    small = b"".join(bytes(p) for p in file_parts(SHAPES, lambda n: np.ones(SHAPES[n], np.float32)))
    llamas = [model_bin(LLAMA, draw(LLAMA.shapes(), 1), version) for version in (0, 1)]
    return {
        "llm.c": Format("m.bin", (GOLDEN / "llmc.bin").read_bytes(), model),
        "llama2.c": Format("m.bin", llamas[0], model),
        "llama2.c, version 1": Format("m.bin", llamas[1], model),
        "safetensors": Format("x.safetensors", small, tensors),
        "GGUF": Format("m.gguf", Made().content(), model),
        "tokens": Format("x.bin", header(20240520, 1, 3) + struct.pack("<3H", 1, 2, 3), tokens),
        "choices": Format("x.bin", header(20240522, 1, 6) + stream(EXAMPLES), choices),
        "tokenizer.bin": Format("tokenizer.bin", tokenizer_bin(300), tokenizer),
        "tokenizer.json": Format("tokenizer.json", Path("tokenizer.json").read_bytes(), tokenizer),
        "bpe": Format("tokenizer.model", (GOLDEN / "sentencepiece" / "bpe.model").read_bytes(), tokenizer),
        "unigram": Format("tokenizer.model", (GOLDEN / "sentencepiece" / "unigram.model").read_bytes(), tokenizer),
        "tokenizer in GGUF": Format("m.gguf", Path("m.gguf").read_bytes(), tokenizer_of),
    }


# A writer of GGUF of the tests' own, which takes anything

U8, I32, U32, F32, BOOL, TEXT, ARRAY, U64 = 0, 5, 4, 6, 7, 8, 9, 10


def text(x, length=None):
    raw = x if isinstance(x, bytes) else x.encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def value(x, length=None):
    """A text as a key's value."""
    return struct.pack("<I", TEXT) + text(x, length)


def f32(x):
    return struct.pack("<If", F32, x)


def u32(x):
    return struct.pack("<II", U32, x)


def array(kind, n, payload=b""):
    return struct.pack("<IIQ", ARRAY, kind, n) + payload


KEYS = {
    "general.architecture": value("llama"),
    "llama.context_length": u32(4),
    "llama.embedding_length": u32(4),
    "llama.block_count": u32(1),
    "llama.feed_forward_length": u32(6),
    "llama.attention.head_count": u32(2),
    "llama.attention.head_count_kv": u32(1),
    "llama.attention.layer_norm_rms_epsilon": f32(1e-5),
}
LAYER = {"attn_norm": (4,), "attn_q": (4, 4), "attn_k": (4, 2), "attn_v": (4, 2), "attn_output": (4, 4)}
LAYER |= {"ffn_norm": (4,), "ffn_gate": (4, 6), "ffn_up": (4, 6), "ffn_down": (6, 4)}
DIMS = {"token_embd.weight": (4, 8), "output_norm.weight": (4,)}
DIMS |= {f"blk.0.{name}.weight": dims for name, dims in LAYER.items()}


class Made:
    """The parts of a file, each of which a case may replace."""

    def __init__(self):
        self.start, self.counts = b"GGUF" + struct.pack("<I", 3), None
        self.keys = [text(k) + x for k, x in KEYS.items()]
        self.tensors, at = [], 0
        for name, dims in DIMS.items():
            self.tensors.append({"name": name, "dims": dims, "kind": 0, "at": at})
            at += -(-int(np.prod(dims)) * 4 // 32) * 32
        self.data = np.linspace(-1, 1, at // 4, dtype="<f4").tobytes()

    def content(self):
        counts = self.counts or (len(self.tensors), len(self.keys))
        head = self.start + struct.pack("<QQ", *counts) + b"".join(self.keys)
        for t in self.tensors:
            dims = t["dims"]
            head += text(t["name"]) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, t["kind"], t["at"])
        return head + bytes(-len(head) % 32) + self.data


def parts(**more):
    """A file with other parts."""
    made = Made()
    vars(made).update(more)
    return made.content()


def key(name, x):
    """A file with another value of a key, or with one more."""
    known = {} if name in KEYS else {name: x}
    keys = {k: x if k == name else old for k, old in KEYS.items()}
    return parts(keys=[text(k) + v for k, v in {**keys, **known}.items()])


def keys(*more):
    return parts(keys=[*Made().keys, *more])


def tensor(i, **more):
    """A file with a tensor that is described otherwise."""
    made = Made()
    made.tensors[i] |= more
    return made.content()


HUGE = 2**63
ENDLESS = "its header goes on for 9223372036854775808 bytes"


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


def metadata(**changes):
    """Change what a GGUF file says of its tokenizer."""

    def of(content):
        Path("before.gguf").write_bytes(content)
        file = gguf.Gguf(Path("before.gguf"))
        about = file.metadata | {f"tokenizer.ggml.{name}": x for name, x in changes.items()}
        stored = {name: (t.dtype, t.shape) for name, t in file.tensors.items()}
        return gguf.header(about, stored) + content[min(t.start for t in file.tensors.values()) :]

    return of


E1 = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
SIZE, SCORE = "bytes; expected", struct.Struct("<fi").pack
CASES = {
    "llm.c": [
        (put(0, 20240520), "llm.c's tokens"),
        (put(0, 7), "magic number, is 7"),
        (put(4, 1), "version, is 1"),
        (put(4, 5), "expected 18560"),
        (put(8, -1), "impossible"),
        (put(16, 2**20), "cut short"),
        (put(16, 3), SIZE),
        (put(20, 3), "multiple"),
        (put(24, 2**20), "cut short"),
        (put(28, 60), "impossible"),
        (lambda c: c[:-1], SIZE),
        (lambda c: c + b"x", SIZE),
        (lambda c: c[:500], "header alone"),
        (b"", "header alone"),
        (b"\x80\x04cbuiltins\nprint\n.", "pickle"),
        (lambda c: b"PK\3\4" + c, "pickle"),
    ],
    "llama2.c": [
        (put(0, 32), "magic number, is 32"),  # 6 heads do not divide it: no sizes of llama2.c
        (put(0, 48), SIZE),
        (lambda c: put(0, 2**20)(put(12, 2**10)(c)), "cut short"),
        (put(8, 4096), "cut short"),
        (put(20, -300), SIZE),
        (put(24, 2**20), SIZE),
        (lambda c: c[:-1], SIZE),
        (lambda c: c + b"x", SIZE),
        (lambda c: c[:100], "cut short"),
        (lambda c: c[:27], "header alone"),
        (b"", "header alone"),
    ],
    "llama2.c, version 1": [
        (lambda c: c[:200], "expected a header of 256"),
        (lambda c: c[:-4], SIZE),
        (put(4, 2), "is 2, int8 numbers; expected 1"),
        (put(36, 7, kind="B"), "head is shared, is 7"),
        (put(8, *[0] * 7), "impossible sizes"),
    ],
    "safetensors": [
        (b"", ""),
        (b"\1\0\0", ""),
        (struct.pack("<Q", 100) + b"{}", ""),
        (struct.pack("<Q", HUGE) + b"{}", ""),
        (safetensors(b"{'a'}"), ""),
        (safetensors(b'{"\xff":1}'), ""),
        (safetensors(b"[" * 100_000), ""),
        (safetensors(b'{"a":' + b"9" * 10_000 + b"}"), ""),
        (safetensors(f'{{"a":{E1},"a":{E1}}}'.encode()), ""),
        (safetensors(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'), ""),
        (safetensors(b'{"\\u001b[2J":%s}' % E1.encode()), ""),
        (safetensors(f'{{"{"a" * 201}":{E1}}}'.encode()), ""),
        (entry(data_offsets=None), ""),
        (entry(x=1), ""),
        (entry(dtype="F33"), ""),
        (entry(shape=[-2]), ""),
        (entry(shape=[0, 10**18], data_offsets=[0, 0]), ""),
        (entry(data_offsets=[8, 0]), ""),
        (safetensors(f'{{"a":{E1},"b":{E1}}}'.encode()), ""),  # an overlap
        (entry(shape=[4], data_offsets=[0, 16]), ""),
        (safetensors(f'{{"__metadata__":{{"a":{{}}}},"a":{E1}}}'.encode()), ""),
        (struct.pack("<Q", 5 << 20) + bytes(6 << 20), "header of 5242880 bytes; expected 4194304"),
    ],
    "GGUF": [
        (b"", "its header goes on"),
        (parts(start=b"GGML" + struct.pack("<I", 3)), "begins with b'GGML'"),
        (parts(start=b"GGUF" + struct.pack("<I", 1)), "version 1; expected 2 or 3"),
        (parts(start=b"GGUF" + struct.pack(">I", 3)), "big-endian"),
        (parts(counts=(HUGE, 8)), "tensors and 8 keys; expected 65536 at most"),
        (parts(counts=(11, 60000)), "give a whole GGUF file"),
        (keys(text("a", HUGE)), ENDLESS),
        (key("a", value("a", HUGE)), ENDLESS),
        (keys(text(b"\xff\xfe") + u32(1)), "a key is no UTF-8"),
        (key("a", value(b"a\xff")), "'a' is no UTF-8"),
        (key("\x1b[2J", u32(1)), r"the key '\x1b[2J'"),
        (keys(text("general.architecture") + u32(1)), "'general.architecture' twice"),
        (key("a", struct.pack("<I", 13)), "'a' has the type 13; known"),
        (key("a", struct.pack("<IB", BOOL, 2)), "neither 0 nor 1"),
        (key("a", array(U8, HUGE)), ENDLESS),
        (key("a", array(U64, 2**61)), f"its header goes on for {2**64} bytes"),
        (key("a", array(TEXT, HUGE)), "give a whole GGUF file"),
        (key("a", array(ARRAY, 2) + array(ARRAY, 2)[4:] * 999), "an array in an array"),
        (key("general.alignment", u32(0)), "general.alignment is 0; expected a power of two"),
        (key("general.alignment", value("32")), "alignment is 32"),
        (key("general.alignment", u32(64)), "bytes from"),
        (parts(tensors=[*Made().tensors, Made().tensors[0]]), "has the tensor 'token_embd.weight' twice"),
        (tensor(0, name="a" * 64), "has a tensor named"),
        (tensor(0, name="a b"), "has a tensor named 'a b'"),
        (tensor(0, dims=[]), "has 0 dimensions; expected 1 to 4"),
        (tensor(0, dims=[4, 0]), "has the shape (0, 4)"),
        (tensor(0, dims=[HUGE, 2]), "has the shape"),
        (tensor(0, kind=99), "has numbers of type 99; known: F32, F16"),
        (tensor(0, kind=8), "has rows of 4; expected a multiple of 32 for Q8_0"),
        (tensor(0, at=1 << 40), "the file has"),
        (tensor(0, at=4), "bytes from"),
        (tensor(3, at=0), "overlap"),
        (parts(data=Made().data[:-1]), "the file has"),
        (key("general.architecture", value("rwkv\n7")), r"'rwkv\n7'"),
        (key("llama.block_count", array(U32, 0)), "llama.block_count is a list"),
        (key("llama.attention.head_count", array(U32, 2, b"\2\0\0\0\1\0\0\0")), "is a list"),
        (key("llama.block_count", u32(0)), "num_hidden_layers is 0"),
        (key("llama.block_count", u32(2**32 - 1)), "block_count is 4294967295; there are 11 tensors"),
        (key("llama.block_count", u32(11)), "lacks 'blk.1.attn_k.weight'"),
        (key("llama.embedding_length", u32(8)), "has the shape"),
        (key("llama.attention.head_count", u32(0)), "num_attention_heads is 0"),
        (key("llama.attention.layer_norm_rms_epsilon", f32(nan)), "rms_norm_eps is nan"),
        (key("llama.block_count", value("1")), "is '1'"),
        (key("llama.expert_count", u32(8)), "llama.expert_count is 8, which cpuopt does not compute"),
        (key("llama.rope.scaling.type", value("yarn")), "rope_type 'yarn'"),
        (key("llama.rope.scaling.factor", f32(nan)), "rope_factor is nan"),
        (key("llama.rope.scaling.attn_factor", f32(2.0)), "llama.rope.scaling.attn_factor is 2.0, which cpuopt does"),
        (key("llama.rope.dimension_count", u32(1)), "head_dim = 1"),
        (tensor(1, name="output_gate.weight"), "has 'output_gate.weight' and 0 more"),
        (key("tokenizer.ggml.eos_token_id", u32(8)), "expected an id below 8"),
        (key("split.count", struct.pack("<IH", 2, 3)), "one of 3 files of a model"),
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
        (lambda c: c + b"\xff\xff", ""),
        (lambda c: c[:-2], ""),
        (lambda c: c[:1030], ""),
        (lambda c: c[:1024] + b"\1\0", ""),
        (b"", ""),
        (b"x" * 100, ""),
        (put(0, 20240520), ""),
    ],
    "tokenizer.bin": [
        (b"", "is 0; expected 1 to 65536"),
        (put(0, 0), "longest piece, is 0"),
        (put(0, 2), "has 5 bytes; expected 1 to 2"),
        (lambda c: c[:-1], "bytes; expected 1 to"),
        (lambda c: c + b"x", "is cut short"),
        (lambda c: c + SCORE(0.0, 2**31 - 1), "has 2147483647 bytes"),
        (lambda c: c + SCORE(0.0, -5), "has -5 bytes"),
        (lambda c: c + SCORE(nan, 1) + b"x", "has the score nan"),
        (lambda c: c + SCORE(inf, 1) + b"x", "has the score inf"),
        (lambda c: c[:4], "pieces 3 to 258"),
        (lambda c: c.replace(b"<0x41>", b"<0x42>"), "pieces 3 to 258"),
    ],
    "tokenizer.json": [
        (b"", ""),
        (lambda c: c[:-10], ""),
        (b"{'a'}", ""),
        (lambda c: c[:-1] + b',"\xff":1}', ""),
        (b'{"decoder":' + b"[" * 100_000, ""),
        (lambda c: b'{"decoder":null,' + c[1:].strip()[:-1] + b',"version":"1.0"}', ""),
        (b"{}", ""),
        (table(lambda t: t["decoder"].update(type="WordPiece")), ""),
        (table(lambda t: t.update(decoder=None)), ""),
        (table(lambda t: t.update(decoder="\x1b[2J")), ""),
        (table(lambda t: (t["model"].update(vocab={}, merges=[]), t.update(added_tokens=[]))), ""),
        (table(lambda t: t["model"]["vocab"].update(zz=2**40)), ""),
        (table(lambda t: t["model"]["vocab"].update(zz=-1)), ""),
        (table(lambda t: t["model"]["merges"].append(["\x1b[2J", "q"])), ""),
        (table(lambda t: t["model"].update(type="Nothing")), ""),
    ],
    "bpe": [
        (b"", ""),
        (b"pieces\n", ""),
        (b"version https://git-lfs.github.com/spec/v1\n", ""),
        (b"\x08" + b"\xff" * 12, ""),  # a number without an end
        (b"\x08\x01", ""),  # a piece that is a number
        (b"\x0a\x02\x18\x01", ""),  # one without a text
        (b"\x0a\xff\xff\xff\xff\x7f", ""),  # a length beyond all
    ],
    "tokenizer in GGUF": [
        (metadata(model="t5"), "a tokenizer of the kind 't5'; expected gpt2 or llama"),
        (metadata(tokens=[]), "tokens is no list of texts"),
        (metadata(tokens=np.zeros(640, np.int32)), "tokens is no list of texts"),
        (metadata(token_type=np.ones(639, np.int32)), "token_type is no list of 640 numbers"),
        (metadata(pre="mine\n"), "cuts text as 'mine\\n', which cpuopt does not; known: gpt-2"),
        (metadata(merges=["a"]), "merges is no list of two tokens"),
        (metadata(merges=["zzz yyy"]), "is no tokenizer.json that can be read"),
        (metadata(model="llama"), "scores are no numbers"),
        (metadata(model="llama", scores=np.full(640, nan, "<f4")), "scores are no numbers"),
        (metadata(model="llama", unknown_token_id=640), "expected an id below 640"),
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
    with taking(16 << 20), pytest.raises(UserError) as e:
        read(path)
    assert time.monotonic() - began < 5
    said = str(e.value)
    assert words in said
    assert file in said
    assert len(said) < 600
    assert said.isprintable()


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
    "tokenizer.json": lambda p: get_tokenizer(str(p)),
    "tokenizer.bin": lambda p: get_tokenizer(str(p)),
    "tokenizer.model": lambda p: get_tokenizer(str(p)),
    "tokenizer_copy.json": lambda p: tokenizer_files(str(p)),
    "tokens.bin": read_tokens,
    "choices.bin": lambda p: evaluate.read_examples(p, 256),
    "settings.toml": run_settings.read,
    "settings.json": run_settings.read,
    "mine.py": lambda p: kernels.load_all([p]),
    checkpoint.MANIFEST: lambda p: checkpoint.newest(Path("run")),
    checkpoint.STATE: lambda p: checkpoint.newest(Path("run")),
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
    with pytest.raises(UserError) as e:
        READERS[name](path)
    assert name in str(e.value) or "tokenizer" in name or path.parts[0] == "run"
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", [*companions.READ, f"{companions.TEMPLATES}/a.jinja"])
def test_a_companion_of_a_gigabyte_is_refused(name):
    Path(name).parent.mkdir(exist_ok=True)
    gigabyte(Path(name))
    with pytest.raises(UserError, match=f"cannot read '{name}': it is no file of at most 16 MB"):
        companions.beside(Path("tokenizer.json"))


@pytest.mark.parametrize("make", [os.mkfifo, device, gigabyte])
@pytest.mark.parametrize("flag", ["--model", "--init"])
def test_a_folder_whose_config_is_no_file(flag, make, capsys):
    Path("m").mkdir()
    make(Path("m/config.json"))
    Path("m/model.safetensors").touch()
    assert "'m/config.json' is no JSON object: it is no file of at most 16 MB" in refused(capsys, "train", flag, "m")

"""The tokenizer inside GGUF: the same ids as from the file that it was made of, and hostile ones."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers as library
from golden.llama2c import draw, tokenizer_bin
from tokenizers import decoders, normalizers, pre_tokenizers, processors, trainers

from cpuopt import cli, models
from cpuopt.data import ggml
from cpuopt.data.tokenizers import BYTES, GPT2Tokenizer, _gpt2_encoding, get_tokenizer
from cpuopt.errors import UserError
from cpuopt.files import gguf as container
from cpuopt.models.llama import Config
from cpuopt.weights import Marks, open_weights, save_weights, vocabulary

SENTENCES = (
    "Once there was a red hen, who'd 12345 eggs on  the sea.\n\n\tIt's DAD'S ÜBER café: naïve? €5!",
    "a\r\n\r\nb   c\u3000d 1a2b33ccc4444",
    " <|im_end|> [PAD7] <s> \x01 \U0001f600 ٣٤ cafe\u0301 and all hens and eggs",
    "",
    " ",
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = Marks(1, (2,))
CONFIG = Config(640, 32, 32, 1, 2, 1, 16, 64, tie_word_embeddings=True)


def byte_pairs(*cuts, ignore_merges=False, normalizer=None):
    made = library.Tokenizer(library.models.BPE(ignore_merges=ignore_merges))
    made.pre_tokenizer = pre_tokenizers.Sequence([*cuts])
    made.decoder = decoders.ByteLevel()
    if normalizer:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        SENTENCES * 3,
        trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    made.add_tokens(["hens and eggs"])
    return made


def pieces(prefix=True, cut=None):
    made = library.Tokenizer(library.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(steps)
    if cut:
        made.pre_tokenizer = cut
    ends = [decoders.Strip(" ", 1, 0)] * prefix
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    special = ["<unk>", "<s>", "</s>"]
    raw = [f"<0x{i:02X}>" for i in range(256)]
    words = trainers.BpeTrainer(vocab_size=420, special_tokens=special + raw, max_token_length=6, show_progress=False)
    made.train_from_iterator(SENTENCES[:2] * 3, words)
    made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    return library.Tokenizer.from_str(json.dumps(content))


def split(name):
    return pre_tokenizers.Split(library.Regex(ggml.PATTERNS[name][0][0]), "isolated")


END = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
KINDS = {
    "gpt-2": lambda: byte_pairs(WORDS),
    "smollm": lambda: byte_pairs(pre_tokenizers.Digits(individual_digits=True), WORDS),
    "llama-bpe": lambda: byte_pairs(split("llama-bpe"), END, ignore_merges=True),
    "dbrx": lambda: byte_pairs(split("dbrx"), END),
    "qwen2": lambda: byte_pairs(split("qwen2"), END, normalizer=normalizers.NFC()),
    "tekken": lambda: byte_pairs(split("tekken"), END, ignore_merges=True),
    "pieces": pieces,
    "pieces without a space": lambda: pieces(prefix=False),
    "pieces of Gemma": lambda: pieces(prefix=False, cut=pre_tokenizers.Split(" ", "merged_with_previous")),
}


def saved(folder, tokenizer, marks=MARKS, config=CONFIG):
    params = draw(config.shapes(), 3)
    save_weights(folder / "m.gguf", config, params.__getitem__, tokenizer=str(tokenizer), marks=marks)
    return folder / "m.gguf"


def same(a, b):
    """Whether two tokenizers are equal, but for what no text shows."""
    assert [a.token_bytes(i) for i in range(a.vocab_size)] == [b.token_bytes(i) for i in range(a.vocab_size)]
    return all(a.start(x) == b.start(x) and a.decode(a.encode(x)) == b.decode(b.encode(x)) for x in SENTENCES)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_json_goes_into_a_file_and_out_again(kind, tmp_path):
    KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    template = {"chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(template))
    (tmp_path / "generation_config.json").write_text(json.dumps(MARKS.ids()))
    path = saved(tmp_path, tmp_path / "tokenizer.json")
    found = container.Gguf(path).metadata
    assert found["tokenizer.ggml.model"] == ("llama" if kind.startswith("pieces") else "gpt2")
    assert found.get("tokenizer.ggml.pre", kind) == kind
    assert len(found["tokenizer.ggml.tokens"]) == len(found["tokenizer.ggml.token_type"]) == 640
    weights = open_weights(path)
    assert (weights.tokenizer, weights.marks) == (str(path), MARKS)
    first = get_tokenizer(str(tmp_path / "tokenizer.json"))
    assert same(first, get_tokenizer(str(path)))
    assert cli.main(["convert", str(path), str(tmp_path / "hf")]) == 0
    assert same(first, get_tokenizer(str(tmp_path / "hf" / "tokenizer.json")))
    about = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert about["chat_template"] == "{{ messages }}"
    assert cli.main(["convert", str(tmp_path / "hf"), str(tmp_path / "again.gguf")]) == 0
    assert same(first, get_tokenizer(str(tmp_path / "again.gguf")))
    assert cli.main(["convert", str(path), str(tmp_path / "copy.gguf")]) == 0
    assert (tmp_path / "copy.gguf").read_bytes() == path.read_bytes()


def test_patterns_are_told_apart(tmp_path):
    """A name for another cut gives other ids: the sentences above show every pattern."""
    seen = []
    for kind in ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"):
        made = KINDS["gpt-2"]()
        content = json.loads(made.to_str())
        cuts = ggml.PATTERNS[kind][0]
        splits = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in cuts]
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": splits}
        cut = library.Tokenizer.from_str(json.dumps(content)).pre_tokenizer
        seen.append([[word for word, _ in cut.pre_tokenize_str(x)] for x in SENTENCES])
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])


def test_bytes_are_tokens_of_a_file(tmp_path):
    config = models.parse("llama-tiny")
    path = saved(tmp_path, "bytes", Marks(), config)
    found = container.Gguf(path).metadata
    alphabet = vocabulary.ALPHABET
    assert found["tokenizer.ggml.tokens"] == [alphabet[i] for i in range(256)]
    assert sorted(alphabet[ord(c)] for c in "az~") == list("az~")
    assert (found["tokenizer.ggml.merges"], found["tokenizer.ggml.eos_token_id"]) == ([], 255)
    assert open_weights(path).tokenizer == "bytes"


def test_llama2c_pieces_are_those_of_a_file(tmp_path):
    (tmp_path / "tokenizer.bin").write_bytes(tokenizer_bin(512))
    path = saved(tmp_path, tmp_path / "tokenizer.bin")
    a, b = get_tokenizer(str(tmp_path / "tokenizer.bin")), get_tokenizer(str(path))
    texts = [x for x in SENTENCES if x and "<s>" not in x]
    assert [a.start(x) for x in texts] == [b.start(x) for x in texts]
    assert [a.token_bytes(i) for i in range(3, 512)] == [b.token_bytes(i) for i in range(3, 512)]


def test_merges_of_byte_pairs_follow_from_their_ranks(tmp_path):
    """tiktoken's file has ranks alone; the merges that made them come back."""
    made = KINDS["gpt-2"]()
    content = json.loads(made.to_str())["model"]
    alphabet = BYTES

    def raw(token):
        return b"".join(alphabet[c] for c in token)

    merges = [m if isinstance(m, list) else m.split(" ") for m in content["merges"]]
    tokens = [alphabet[c] for c in sorted(alphabet)] + [raw(a + b) for a, b in merges]
    ranks = {token: i for i, token in enumerate(tokens)}
    assert [vocabulary._halves(token, ranks) for token in tokens[256:]] == [[*pair] for pair in merges]
    encoding = _gpt2_encoding(b"\n".join(base64.b64encode(t) + b" %d" % i for i, t in enumerate(tokens)))
    tokenizer = GPT2Tokenizer(encoding)
    tokenizer.vocab_size, tokenizer.eot = len(tokens) + 1, len(tokens)
    tokenizer.token_bytes = lambda i: [*tokens, b""][i]
    found = vocabulary._of_bytes(tokenizer)
    assert found["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]
    assert found["tokenizer.ggml.tokens"][-1] == "<|endoftext|>"


def test_a_model_without_a_tokenizer(tmp_path):
    path = tmp_path / "m.gguf"
    save_weights(path, CONFIG, draw(CONFIG.shapes(), 3).__getitem__)
    assert container.Gguf(path).metadata["tokenizer.ggml.model"] == "none"
    assert open_weights(path).tokenizer is None


KEY = "tokenizer.ggml."
HOSTILE = {
    "another kind": ({"model": "t5"}, "a tokenizer of the kind 't5'; expected gpt2 or llama"),
    "no tokens": ({"tokens": []}, "tokens is no list of texts"),
    "tokens that are numbers": ({"tokens": np.zeros(640, np.int32)}, "tokens is no list of texts"),
    "types of some": ({"token_type": np.ones(639, np.int32)}, "token_type is no list of 640 numbers"),
    "types that are no numbers": ({"token_type": ["1"] * 640}, "token_type is no list of 640 numbers"),
    "another cut": ({"pre": "mine\n"}, "cuts text as 'mine\\n', which cpuopt does not; known: gpt-2"),
    "a cut that is a number": ({"pre": 7}, "cuts text as 7"),
    "merges that are numbers": ({"merges": np.ones(4, np.int32)}, "merges is no list of two tokens"),
    "a merge of one": ({"merges": ["a"]}, "merges is no list of two tokens"),
    "merges of what is no token": ({"merges": ["zzz yyy"]}, "is no tokenizer.json that can be read"),
    "pieces without scores": ({"model": "llama"}, "scores are no numbers"),
    "scores that are NaN": ({"model": "llama", "scores": np.full(640, np.nan, "<f4")}, "scores are no numbers"),
    "an unknown that is none": ({"model": "llama", "unknown_token_id": 640}, "expected an id below 640"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    KINDS["gpt-2"]().save(str(folder / "tokenizer.json"))
    return saved(folder, folder / "tokenizer.json")


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_tokenizer_is_refused_in_one_line(case, whole, tmp_path):
    change, words = HOSTILE[case]
    file = container.Gguf(whole)
    about = file.metadata | {KEY + name: x for name, x in change.items()}
    stored = {name: (t.dtype, t.shape) for name, t in file.tensors.items()}
    data = whole.read_bytes()[next(iter(file.tensors.values())).start :]
    path = tmp_path / "m.gguf"
    path.write_bytes(container.header(about, stored) + data)
    with pytest.raises(UserError) as e:
        get_tokenizer(str(open_weights(path).tokenizer))
    assert words in str(e.value)
    assert len(str(e.value).splitlines()) == 1
    assert cli.main(["convert", str(path), str(tmp_path / "hf"), "--tokenizer", "bytes"]) == 0


REFUSED = {
    "a unigram": (lambda c: c["model"].update(type="Unigram"), "a model of the kind 'Unigram'"),
    "another normalizer": (lambda c: c.update(normalizer={"type": "Lowercase"}), "how it cuts text"),
    "another pattern": (
        lambda c: c["pre_tokenizer"].update(pretokenizers=[{"type": "Whitespace"}]),
        "how it cuts text",
    ),
    "a space before": (lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(add_prefix_space=True), "how it cuts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_gguf_cannot_say_is_refused(case, tmp_path, whole, monkeypatch):
    change, words = REFUSED[case]
    content = json.loads((whole.parent / "tokenizer.json").read_text())
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    found = get_tokenizer(str(path))
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"GGUF cannot say {words}"):
        vocabulary._of_json(found)
    if case != "a unigram":
        with pytest.raises(UserError, match=f"GGUF cannot say {words}"):
            saved(tmp_path, path)
        assert not (tmp_path / "m.gguf").exists()


def test_text_is_made_with_the_tokenizer_inside(tmp_path, monkeypatch, capsys):
    """A run starts from a file, and keeps its tokenizer; another file has it after the run."""
    monkeypatch.chdir(tmp_path)
    config = models.from_json({**models.parse("llama-tiny").to_json(), "vocab_size": 640})
    KINDS["llama-bpe"]().save("tokenizer.json")
    saved(tmp_path, "tokenizer.json", config=config)
    Path("tokenizer.json").unlink()
    Path("text.txt").write_text(SENTENCES[0] * 40)
    words = ["-B", "2", "-T", "16", "--steps", "2", "--data", "text.txt", "--save", "tuned.gguf"]
    assert cli.main(["train", "--init", "m.gguf", *words]) == 0
    capsys.readouterr()
    tuned = open_weights(Path("tuned.gguf"))
    assert tuned.tokenizer == "tuned.gguf"
    assert same(get_tokenizer("m.gguf"), get_tokenizer("tuned.gguf"))
    outputs = []
    for init in ("tuned.gguf", "hf"):
        if init == "hf":
            assert cli.main(["convert", "tuned.gguf", "hf"]) == 0
            capsys.readouterr()
        words = ["--prompt", "Once", "--max-tokens", "8", "--temperature", "0", "--json"]
        assert cli.main(["generate", "--init", init, *words]) == 0
        outputs.append(json.loads(capsys.readouterr().out)["ids"])
    assert outputs[0] == outputs[1]

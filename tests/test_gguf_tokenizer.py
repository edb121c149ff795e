"""The tokenizer inside GGUF: the same ids as from the file that it was made of, and hostile ones."""

import base64
import json
from functools import partial
from pathlib import Path

import pytest
from golden.llama2c import draw, tokenizer_bin
from small_tokenizers import SENTENCES, byte_pairs, pieces
from tokenizers import pre_tokenizers
from verbs import fails, ran

from cpuopt import cli, models
from cpuopt.data import ggml
from cpuopt.data.tokenizers import BYTES, GPT2Tokenizer, _gpt2_encoding, get_tokenizer
from cpuopt.files import gguf as container
from cpuopt.models.llama import Config
from cpuopt.weights import Marks, open_weights, save_weights, vocabulary

MARKS, CONFIG = Marks(1, (2,)), Config(640, 32, 32, 1, 2, 1, 16, 64, tie_word_embeddings=True)


KINDS = {
    **{kind: partial(byte_pairs, kind) for kind in ("gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken")},
    "pieces": pieces,
    "pieces without a space": partial(pieces, prefix=False),
    "pieces of Gemma": partial(pieces, prefix=False, cut=pre_tokenizers.Split(" ", "merged_with_previous")),
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
    made = KINDS[kind]()
    made.add_tokens(["hens and eggs"] * ("pieces" not in kind))
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (tmp_path / "generation_config.json").write_text(json.dumps(MARKS.ids()))
    path = saved(tmp_path, tmp_path / "tokenizer.json")
    found = container.Gguf(path).metadata
    assert found["tokenizer.ggml.model"] == ("llama" if kind.startswith("pieces") else "gpt2")
    assert found.get("tokenizer.ggml.pre", kind) == kind
    assert len(found["tokenizer.ggml.tokens"]) == len(types := found["tokenizer.ggml.token_type"]) == 640
    assert (types == ggml.BYTE).sum() == 256 * kind.startswith("pieces")
    weights = open_weights(path)
    assert (weights.tokenizer, weights.marks) == (str(path), MARKS)
    first = get_tokenizer(str(tmp_path / "tokenizer.json"))
    assert same(first, get_tokenizer(str(path)))
    assert cli.main(["convert", str(path), str(tmp_path / "hf")]) == 0
    assert same(first, get_tokenizer(str(tmp_path / "hf" / "tokenizer.json")))
    assert json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
    assert cli.main(["convert", str(tmp_path / "hf"), str(tmp_path / "again.gguf")]) == 0
    assert same(first, get_tokenizer(str(tmp_path / "again.gguf")))
    assert cli.main(["convert", str(path), str(tmp_path / "copy.gguf")]) == 0
    assert (tmp_path / "copy.gguf").read_bytes() == path.read_bytes()


def test_bytes_are_tokens_of_a_file(tmp_path):
    path = saved(tmp_path, "bytes", Marks(), models.parse("llama-tiny"))
    found, alphabet = container.Gguf(path).metadata, vocabulary.ALPHABET
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
    merges = [m if isinstance(m, list) else m.split(" ") for m in json.loads(made.to_str())["model"]["merges"]]
    raw = lambda token: b"".join(BYTES[c] for c in token)  # noqa: E731
    tokens = [BYTES[c] for c in sorted(BYTES)] + [raw(a + b) for a, b in merges]
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["model"].update(type="Unigram"), "a model of the kind 'Unigram'"),
        (lambda c: c.update(normalizer={"type": "Lowercase"}), "how it cuts text"),
        (lambda c: c["pre_tokenizer"].update(pretokenizers=[{"type": "Whitespace"}]), "how it cuts text"),
        (lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(add_prefix_space=True), "how it cuts text"),
    ],
)
def test_what_gguf_cannot_say_is_refused(change, words, tmp_path):
    KINDS["gpt-2"]().save(str(path := tmp_path / "tokenizer.json"))
    content, found = json.loads(path.read_text()), get_tokenizer(str(path))
    change(content)
    path.write_text(json.dumps(content))
    fails(f"GGUF cannot say {words}", vocabulary._of_json, found)


def test_text_is_made_with_the_tokenizer_inside(here, tmp_path, capsys):
    """A run starts from a file, and keeps its tokenizer; another file has it after the run."""
    config = models.from_json({**models.parse("llama-tiny").to_json(), "vocab_size": 640})
    KINDS["llama-bpe"]().save("tokenizer.json")
    saved(tmp_path, "tokenizer.json", config=config)
    Path("tokenizer.json").unlink()
    Path("text.txt").write_text(SENTENCES[0] * 40)
    quick = ["--variant", "vanilla"]
    words = ["-B", "2", "-T", "16", "--steps", "2", "--data", "text.txt", "--save", "tuned.gguf", *quick]
    assert cli.main(["train", "--init", "m.gguf", *words]) == cli.main(["convert", "tuned.gguf", "hf"]) == 0
    capsys.readouterr()
    assert open_weights(Path("tuned.gguf")).tokenizer == "tuned.gguf"
    assert same(get_tokenizer("m.gguf"), get_tokenizer("tuned.gguf"))
    words = ["--prompt", "Once", "--max-tokens", "8", "--temperature", "0", *quick]
    one, two = (ran(capsys, "generate", "--init", init, *words)["ids"] for init in ("tuned.gguf", "hf"))
    assert one == two

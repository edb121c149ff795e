"""Train tiny models of SentencePiece, and write the ids that it gives texts, for ``tests/test_sentencepiece.py``."""

import json
import tempfile
from pathlib import Path

import sentencepiece

HERE = Path(__file__).parent / "sentencepiece"
TEXT = Path(json.__file__).read_text() + "naïve café, größer, 你好 hello world: the quick brown fox\n" * 9
RULES = "FB01\t66 69\nBD\t31 2F 32\n3000\t20\n"
"""A ligature, a half and a wide space, and what they become."""
SYMBOLS = ["<sep>", "<two words>"]
COMMON = {"user_defined_symbols": SYMBOLS, "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2}
PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
KINDS = {
    "bpe": {"model_type": "bpe", "vocab_size": 400, **PLAIN},
    "bpe without a prefix": {
        "model_type": "bpe",
        "vocab_size": 400,
        **PLAIN,
        "add_dummy_prefix": False,
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "eos_piece": "<eos>",
        "bos_piece": "<bos>",
    },
    "unigram": {"model_type": "unigram", "vocab_size": 300},
}
TEXTS = [
    "",
    " ",
    "hello world",
    "  two  spaces, and more   ",
    "a\n\nb\tc\r\n",
    "naïve café 你好 größer 10 + 2345",
    "ﬁne ½ wide\u3000space",
    "\U0001f600 \u0000 \ufeff cafe\u0301",
    "<s> </s> <unk> <0x41> <pad> <bos> <eos>",
    "<sep>b a<sep> c <two words>d<two words><sep>",
    "▁ hello▁world _",
    "def decode(self, s, _w=WHITESPACE.match):",
    "l" * 40,
]


def main() -> None:
    """Write the models, and the ids as JSON."""
    found = {}
    for kind, how in KINDS.items():
        file = HERE / f"{kind.replace(' ', '_')}.model"
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            (folder / "text").write_text(TEXT)
            (folder / "rules.tsv").write_text(RULES)
            rules = {} if "normalization_rule_name" in how else {"normalization_rule_tsv": str(folder / "rules.tsv")}
            given = COMMON | how | rules | {"input": str(folder / "text"), "model_prefix": str(folder / "m")}
            sentencepiece.SentencePieceTrainer.train(**given)
            file.write_bytes((folder / "m.model").read_bytes())
        library = sentencepiece.SentencePieceProcessor(model_file=str(file))
        found[kind] = [library.encode(text) for text in TEXTS]
    (HERE / "ids.json").write_text(json.dumps({"texts": TEXTS, "ids": found}) + "\n")


if __name__ == "__main__":
    main()

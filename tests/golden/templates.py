"""Chat templates of eight families after their published shapes, small tokenizers for them, and chats.

What an assistant writes stands between ``{% generation %}`` and ``{% endgeneration %}``, which `PLAIN` leaves out.
"""

import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

HERE = Path(__file__).parent / "templates"
CHATML, SYSTEM, LLAMA2, LLAMA3, GEMMA, PHI3, ZEPHYR, TULU = (
    (HERE / f"{name}.jinja").read_text().removesuffix("\n")
    for name in ("chatml", "system", "llama2", "llama3", "gemma", "phi3", "zephyr", "tulu")
)
IM = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
HEADERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TURNS = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>", "<s>"]
FAMILIES = {  # template, kind of tokenizer, special tokens, of which these begin and end
    "llama2": (LLAMA2, "first", ["<s>", "</s>"], "<s>", "</s>"),
    "llama3": (LLAMA3, "bytes", HEADERS, "<|begin_of_text|>", "<|eot_id|>"),
    "gemma": (GEMMA, "none", ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<eos>"),
    "phi3": (PHI3, "strip", TURNS, "<s>", "<|endoftext|>"),
    "zephyr": (ZEPHYR, "always", ["<s>", "</s>"], "<s>", "</s>"),
    "qwen2": (SYSTEM + CHATML, "bytes", IM, None, "<|im_end|>"),
    "smollm2": (SYSTEM.replace("helper", "helpful AI assistant named SmolLM") + CHATML, "bytes", IM, *IM[:2]),
    "olmo2": (TULU, "bytes", ["<|endoftext|>", "<|pad|>"], "<|endoftext|>", "<|endoftext|>"),
}
CHATS = [
    [("user", "Hello?"), ("assistant", "A zim.")],
    [("system", "Be odd."), ("user", " What?\n"), ("assistant", "\n\nÉ 🙂  hello "), ("user", "And"),
     ("assistant", "x")],
    [("user", "a"), ("assistant", " hello\n"), ("user", "hello </s><|im_end|>"), ("assistant", "<|end|> yes"),
     ("user", "b")],
    [("assistant", "hello"), ("user", "hello")],
]  # fmt: skip
"""The last has no prompt before its answer, and the third says what special tokens are called."""


def plain(template):
    return re.sub(r"\{% (end)?generation %\}", "", template)


def tokenizer(kind, special):
    """Return a small tokenizer: byte pairs of bytes, or of SentencePiece's kind with its ways to put spaces."""
    if kind == "bytes":
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        pairs = [("Ċ", "Ċ"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("Ġ", "Ġ")]
    else:
        letters = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *map(chr, range(33, 127))]
        pairs = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "▁"), (".", "<")]
    vocab = {text: i for i, text in enumerate([*letters, *(a + b for a, b in pairs)])}
    t = Tokenizer(
        models.BPE(vocab, pairs, unk_token=None if kind == "bytes" else "<unk>", byte_fallback=kind != "bytes")
    )
    if kind == "bytes":
        t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    elif kind in ("first", "always"):
        t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    else:
        prepend = [normalizers.Prepend("▁")] if kind == "strip" else []
        t.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    if kind != "bytes":
        t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    rstrip = kind == "strip"
    t.add_special_tokens([AddedToken(s, rstrip=rstrip and s != "<s>", normalized=False) for s in special])
    return t

"""Tokenizers of a few hundred tokens, of the kinds that models have."""

import json

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from cpuopt.data.ggml import PATTERNS

SENTENCES = (
    "Once there was a red hen, who'd 12345 eggs on  the sea.\n\n\tIt's DAD'S ÜBER café: naïve? €5!",
    "a\r\n\r\nb   c\u3000d 1a2b33ccc4444",
    " <|im_end|> [PAD7] <s> \x01 \U0001f600 ٣٤ cafe\u0301 and all hens and eggs",
    "",
    " ",
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS, END = (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=x) for x in (True, False))
CUTS = {"gpt-2": [WORDS], "smollm": [pre_tokenizers.Digits(individual_digits=True), WORDS]}
"""How a file cuts text; of other kinds, by the patterns of llama.cpp."""


def byte_pairs(kind="gpt-2", texts=SENTENCES * 3, size=340, special=SPECIAL):
    """Train the kind of GPT-2, Llama 3, SmolLM2 and Qwen."""
    patterns, whole = PATTERNS[kind]
    made = Tokenizer(models.BPE(ignore_merges=whole))
    cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    made.pre_tokenizer = pre_tokenizers.Sequence(CUTS.get(kind, [*cuts, END]))
    made.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        made.normalizer = normalizers.NFC()
    how = {"special_tokens": [*special], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, show_progress=False, **how))
    return made


def pieces(prefix=True, cut=None, texts=SENTENCES[:2] * 3, size=420, longest=6):
    """Train the kind of Llama 2 and Gemma."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")])
    if cut:
        made.pre_tokenizer = cut
    ends = [decoders.Strip(" ", 1, 0)] * prefix
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    how = {"special_tokens": special, "max_token_length": longest, "show_progress": False}
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, **how))
    made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(content))

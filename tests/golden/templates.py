"""Chat templates of eight families after their published shapes, small tokenizers for them, and chats.

What an assistant writes stands between ``{% generation %}`` and ``{% endgeneration %}``, which `PLAIN` leaves out.
"""

import re

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SYSTEM = "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are a helper.<|im_end|>\n' }}{% endif %}"
LLAMA2 = """{{ bos_token }}{% set first = messages[0] %}{% for m in messages %}
  {%- if m.role == 'system' %}{% continue %}{% endif %}
  {%- if m.role == 'user' %}
    {%- set said = '<<SYS>>\\n' + first.content + '\\n<</SYS>>\\n\\n' if loop.index == 2 and first.role == 'system' %}
    {{- '[INST] ' + (said or '') + m.content.strip() + ' [/INST]' }}
  {%- else %}
    {%- if loop.first %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}
    {%- set answer = ' ' + m.content.strip() + eos_token %}{% generation %}{{ answer }}{% endgeneration %}{{ '' }}
  {%- endif %}
{%- endfor %}"""
LLAMA3 = (
    "{% for m in messages %}{{ bos_token if loop.first }}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}{{ '<start_of_turn>' + role + '\n' }}"
    "{% if role == 'model' %}{% generation %}{{ m['content'] | trim + '<end_of_turn>' }}{% endgeneration %}{% else %}"
    "{{ m['content'] | trim + '<end_of_turn>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
ZEPHYR = """{% for m in messages %}
{% if m['role'] == 'assistant' %}
{{ '<|assistant|>\n' }}{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}{{ '' }}
{% else %}
{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
TULU = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}{{ '' if loop.last else '\n' }}"
    "{% else %}{{ m['content'] + '\n' }}{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}"
    "{% endif %}{% endfor %}"
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
    [
        ("system", "Be odd."),
        ("user", " What?\n"),
        ("assistant", "\n\nÉ 🙂  hello "),
        ("user", "And"),
        ("assistant", "x"),
    ],
    [
        ("user", "a"),
        ("assistant", " hello\n"),
        ("user", "hello </s><|im_end|>"),
        ("assistant", "<|end|> yes"),
        ("user", "b"),
    ],
    [("assistant", "hello"), ("user", "hello")],
]
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
        replace = decoders.Replace("▁", " ")
        t.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse()])
    rstrip = kind == "strip"
    t.add_special_tokens([AddedToken(s, rstrip=rstrip and s != "<s>", normalized=False) for s in special])
    return t

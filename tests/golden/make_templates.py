"""Write templates.json: chats of eight families as ``transformers`` renders, tokenizes and masks them.

pip install 'transformers==5.24.0' && python tests/golden/make_templates.py
"""

import json
from pathlib import Path

import templates
from transformers import PreTrainedTokenizerFast


def row(t, template, messages):
    """The text, its ids, the characters that count, and the ids of the chat without its last message as a prompt."""
    try:
        text = t.apply_chat_template(messages, chat_template=templates.plain(template), tokenize=False)
    except Exception as e:
        return {"error": str(e)}
    how = {"chat_template": templates.plain(template), "return_dict": False, "sanitize_control_tokens": True}
    found = t.apply_chat_template(messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True)
    ids = t.apply_chat_template(messages, **how)
    same = ids == found["input_ids"]  # else a message has the text of a special token
    runs = "".join(map(str, found["assistant_masks"])) if same else None
    asked = t.apply_chat_template(messages[:-1], add_generation_prompt=True, **how) if len(messages) > 1 else None
    return {"text": text, "ids": ids, "mask": runs, "asked": asked}


made = {}
for name, (template, kind, special, bos, eos) in templates.FAMILIES.items():
    marks = {key: text for key, text in (("bos_token", bos), ("eos_token", eos)) if text}
    t = PreTrainedTokenizerFast(tokenizer_object=templates.tokenizer(kind, special), **marks)
    t.chat_control_tokens = special
    made[name] = []
    for chat in templates.CHATS:
        made[name].append(row(t, template, [{"role": role, "content": text} for role, text in chat]))
lines = [json.dumps(name) + ": [\n" + ",\n".join(map(json.dumps, rows)) + "\n]" for name, rows in made.items()]
Path(__file__).with_name("templates.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")

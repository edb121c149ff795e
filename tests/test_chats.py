"""Examples of chats: what the model sees, what counts, rows and their order, and what is refused."""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from verbs import error_of, fails, goes_on, printed, ran, refused

from cpuopt import Choice, cli
from cpuopt.comm.threads import Team
from cpuopt.data.chats import load_chats, packed
from cpuopt.data.corpus import is_examples, load_corpus
from cpuopt.data.forms import FORMATS, TurnEncoder
from cpuopt.data.shapes import example_of, rows_of
from cpuopt.data.stored import File
from cpuopt.data.tokenizers import Bytes
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.generate.chat import Conversation
from cpuopt.models import parse
from cpuopt.train.job import NamedModel, Settings, open_data, prepare
from cpuopt.train.settings import DATA, EXAMPLES

TURNS = [("system", "Be odd."), ("user", "What?"), ("assistant", " A zim. "), ("user", "And?"), ("assistant", "No")]
NAMES = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


class Headers(Bytes):
    """Bytes, and the special tokens of Llama 3's form."""

    name, vocab_size = "headers", 260

    def id_of(self, token):
        return 256 + NAMES.index(token) if token in NAMES else None


pytestmark = pytest.mark.usefixtures("here")


def lines(*examples, name="c.jsonl"):
    with open(name, "w") as file:
        file.write("".join(f"{e if isinstance(e, str) else json.dumps(e)}\n" for e in examples))


def chat(*turns):
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def weighed(weight, role="assistant", name="weight"):
    """A question and its answer, one of which has a weight, or another field."""
    turns = chat(("user", "a"), ("assistant", "b"))
    return {"messages": [{**m, **({name: weight} if m["role"] == role else {})} for m in turns["messages"]]}


def pairs(n):
    return [{"prompt": f"q{i}", "completion": "a" * (1 + i % 7)} for i in range(n)]


def load(T=256, name="c.jsonl", **how):
    return load_chats([Path(name)], name=name, vocab_size=512, T=T, **how)


def not_loaded(words, **how):
    """The examples are refused with these words; give all of them."""
    said = error_of(load, **how)
    assert words in said
    return said


# What the model sees, and what counts


@pytest.mark.parametrize("form", ["chatml", "llama3"])
def test_an_example_is_what_a_chat_reads(form, monkeypatch):
    """By the code of `generate --chat`, which is given the answers as if the model had written them."""
    tokenizer = Bytes() if form == "chatml" else Headers()
    monkeypatch.setattr("cpuopt.data.chats.get_tokenizer", lambda name: tokenizer)
    monkeypatch.setattr("cpuopt.generate.chat.check_tokens", lambda *a: None)
    lines(chat(*TURNS))
    (example,) = load().train
    reader = SimpleNamespace(position=0, config=None, context=999)
    talk = Conversation(reader, TurnEncoder(tokenizer, FORMATS[form]), "Be odd.")
    for (_, said), (_, answer) in zip(TURNS[1::2], TURNS[2::2], strict=True):
        text = answer.strip() if form == "llama3" else answer
        monkeypatch.setattr("cpuopt.generate.chat.generate", lambda *a, text=text: iter(text.encode()))
        list(talk.reply(said, None, 99))
    assert example.ids.tolist() == talk.tokens


def test_the_forms_are_those_of_their_models(monkeypatch):
    lines(chat(("user", " hi "), ("assistant", "yo")))
    (example,) = load().train
    start, end = bytes([0xFE]), bytes([0xFF])
    assert example.ids.tolist() == [*(start + b"user\n hi " + end + b"\n" + start + b"assistant\nyo" + end + b"\n")]
    assert [i for i, c in zip(example.ids.tolist(), example.counted, strict=True) if c] == [*b"yo", 0xFF]
    monkeypatch.setattr("cpuopt.data.chats.get_tokenizer", lambda name: Headers())
    begin, head, tail, eot = range(256, 260)
    (example,) = load().train
    whole = [begin, head, *b"user", tail, *b"\n\nhi", eot, head, *b"assistant", tail, *b"\n\nyo", eot]
    assert example.ids.tolist() == whole
    assert np.flatnonzero(example.counted).tolist() == [len(whole) - 3, len(whole) - 2, len(whole) - 1]


def test_two_fields_are_two_messages_all_of_a_text_counts_and_what_a_message_says_is_no_special_token():
    two, said = {"prompt": "What?", "completion": "That."}, {"prompt": "<|im_end|>", "completion": "ÿ þ"}
    lines(two, chat(("user", "What?"), ("assistant", "That.")), {"text": "plain"}, said)
    first, second, text, special = sorted(load().train, key=lambda e: e.number)
    assert first.ids.tolist() == second.ids.tolist()
    assert (text.ids.tolist(), text.counted.tolist()) == ([*b"\nplain"], [False] + [True] * 5)
    assert Counter(i for i in special.ids.tolist() if i >= 0xFE) == {0xFE: 2, 0xFF: 2}


QA = [("user", "Q", False), ("assistant", "A", True)]
OPENAI = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}
ALPACA = {"instruction": "Q", "input": "", "output": "A"}
OTHER = [{"role": "user", "content": "no"}, {"role": "assistant", "content": "B", "weight": 1, "name": "x"}]
SHAPES = {
    "OpenAI": (OPENAI, QA),
    "a weight of 0": ({"messages": [OPENAI["messages"][0], {**OPENAI["messages"][1], "weight": 0}, *OTHER]},
                      [QA[0], ("assistant", "A", False), ("user", "no", False), ("assistant", "B", True)]),
    "ShareGPT": (SHAREGPT, QA),
    "ShareGPT with a system column, and an id": ({"id": 7, "system": "S", **SHAREGPT}, [("system", "S", False), *QA]),
    "Magpie: the conversation again in two columns": ({**SHAREGPT, "instruction": "Q", "response": "A"}, QA),
    "Alpaca": (ALPACA, QA),
    "Alpaca as on the hub, with its text": ({**ALPACA, "text": "### Instruction:\nQ\n\n### Response:\nA"}, QA),
    "Alpaca with an input": ({**ALPACA, "input": "I"}, [("user", "Q\nI", False), QA[1]]),
    "Dolly": ({"instruction": "Q", "context": "", "response": "A", "category": "open_qa"}, QA),
    "OpenOrca": ({"system_prompt": "", "question": "Q", "response": "A", "id": "niv"}, QA),
    "GSM8K": ({"question": "Q", "answer": "A"}, QA),
    "prompt and response": ({"prompt": "Q", "response": "A", "source": "x", "score": 0.5}, QA),
    "prompt and completion": ({"prompt": "Q", "completion": "A"}, QA),
    "TRL": ({"prompt": OPENAI["messages"][:1], "completion": OPENAI["messages"][1:]}, QA),
    "TRL with an answer in the prompt": (
        {"prompt": [*OPENAI["messages"], OTHER[0]], "completion": OTHER[1:]},
        [QA[0], ("assistant", "A", False), ("user", "no", False), ("assistant", "B", True)],
    ),
    "UltraChat, no_robots": ({"prompt": "Q", "prompt_id": "0", "category": "Open QA", **OPENAI}, QA),
    "its rendered text beside it": ({**OPENAI, "text": "<|user|>Q<|assistant|>A<|end|>"}, QA),
    "text": ({"text": "plain", "label": False}, "plain"),
    "null columns": ({"messages": None, "prompt": "Q", "completion": "A", "text": None, "tools": None}, QA),
    "empty columns": ({**OPENAI, "prompt": "", "completion": "", "text": "", "tools": []}, QA),
    "content in parts": (chat(("user", [{"type": "text", "text": "Q"}]), ("assistant", "A")), QA),
    "role developer": (chat(("developer", "S"), ("user", "Q"), ("assistant", "A")), [("system", "S", False), *QA]),
}  # fmt: skip


def said_in(name, content):
    """What the rows of a file say, with their lines."""
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    rows = [(row.where.rsplit(" ", 1)[1], row.value()) for row in rows_of(File(Path(name)))]
    return [(where, example_of(value).said) for where, value in rows]


@pytest.mark.parametrize("row", SHAPES.values(), ids=SHAPES.keys())
def test_published_shapes(row):
    row, said = row
    assert said_in("c.jsonl", json.dumps(row)) == [("1", said)]


LINE = json.dumps(OPENAI)
LONG = json.dumps(OPENAI, indent=1)
FILES = {
    "lines": ("c.jsonl", f"{LINE}\n{LINE}\n", "12"),
    "another name of them": ("c.ndjson", f"{LINE}\n{LINE}\n", "12"),
    "capital letters": ("C.JSONL", f"{LINE}\n{LINE}\n", "12"),
    "no name for them": ("examples", f"{LINE}\n{LINE}\n", "12"),
    "no end of the last line, and empty lines": ("c.jsonl", f"\n{LINE}\n\n \n{LINE}", "25"),
    "lines of Windows, a byte order mark": ("c.jsonl", f"\ufeff{LINE}\r\n\r\n{LINE}\r\n", "13"),
    "a list": ("c.json", json.dumps([OPENAI] * 2), "11"),
    "a list, indented": ("c.json", json.dumps([OPENAI] * 2, indent=1), ["2", "14"]),
    "a list by no name": ("c", f"\ufeff [\r\n{LINE},\r\n{LINE}\r\n]\r\n", "23"),
    "objects of several lines": ("c.json", f"{LONG}\n{LONG}\n", ["1", "13"]),
    "a list of messages in each line": ("c.jsonl", f"{json.dumps(OPENAI['messages'])}\n" * 2, "12"),
}


@pytest.mark.parametrize("file", FILES.values(), ids=FILES.keys())
def test_files_of_examples_are_recognized_by_their_content(file):
    name, content, where = file
    assert said_in(name, content) == [(line, QA) for line in where]
    assert is_examples(name)
    sizes = {"vocab_size": 256, "T": 4, "B": 1}
    fails(r"holds examples, and no text; .* a file whose name ends in .txt is text", load_corpus, name, **sizes)
    Path("c.txt").write_bytes(Path(name).read_bytes())
    assert not is_examples("c.txt")
    assert "'c.txt' begins as examples do; with a name in .jsonl" in load_corpus("c.txt", **sizes).source


def test_parquet_is_read_as_the_lines_that_it_is_converted_to(monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{**OPENAI, "id": 1, "tools": None}, {"messages": OTHER, "id": 2, "tools": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), "c.parquet")
    content, other = Path("c.parquet").read_bytes(), [("user", "no", False), ("assistant", "B", True)]
    assert said_in("c.parquet", content) == [("1", QA), ("2", other)]
    assert said_in("c", content) == [("1", QA), ("2", other)]
    assert is_examples("c")
    Path("c.parquet").write_bytes(content[:-8])
    assert not_loaded("", name="c.parquet").startswith("cannot read 'c.parquet': ")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    not_loaded("'c.parquet', which is Parquet, needs the library pyarrow, ", name="c.parquet")


@pytest.mark.parametrize(("files", "words"), [
    ({"c.json": f"[{LINE},\n{LINE}"}, "'c.json', line 2: the list has no ']'; was the file cut short?"),
    ({"c.json": f"[{LINE},\n{LINE[:-3]}"}, "'c.json', line 2: it is no JSON (Expecting ',' delimiter at character"),
    ({"c.json": f"[{LINE}\n{LINE}]"}, "'c.json', line 2: '{\"messages\": [{\"role' follows an example; expected"),
    ({"c.json": f"[\n{LINE}]\n{LINE}"}, "'c.json', line 3: '{\"messages\": [{\"role' follows the list; expected"),
    ({"c.json": f"[\n{LINE},\n1]"}, "'c.json', line 3: it is a whole number; expected an object with 'messages',"),
    ({"c.json": '{"a": 1}'}, "'c.json', line 1: it has 'a'; expected 'messages', 'conversations',"),
    ({"c.json": "[]"}, "'c.*' has no example; expected a row for each"),
    ({"c.json": LINE, "c.txt": "a"}, "'c.*' matches examples, such as 'c.json', and text, such as 'c.txt'; give"),
])  # fmt: skip
def test_a_file_whose_rows_cannot_be_told_apart_is_named(files, words):
    for name, content in files.items():
        Path(name).write_text(content)
    settings = Settings(data="c.*").some(*DATA, *EXAMPLES)
    assert error_of(open_data, NamedModel("", parse("gpt2-tiny")), **settings).startswith(words)


def test_json_of_another_kind_is_text_beside_texts():
    Path("package.json").write_text('{"name": "x"}')
    Path("a.js").write_text("{ let x = 1 }\n" * 9)
    assert not is_examples("*")
    assert load_corpus("*", vocab_size=256, T=4, B=1).files


@pytest.mark.parametrize(("line", "words"), [
    ("{", "line 2: it is no JSON (Expecting property name"),
    ("hello", "line 2: it is no JSON (Expecting value at character 1); expected an object with 'messages', "),
    ("1", "line 2: it is a whole number; expected an object with 'messages', "),
    ('{"text": "a"} {"text": "b"}', 'it has more than one value: \'{"text": "b"}\'; expected one on each line'),
    ('{"text": "a", "text": "b"}', "'text' comes twice"),
    ({"prompt": "a", "chosen": "b"}, "it has 'chosen', 'prompt'; expected 'messages', "),
    ({"prompt": "a", "completion": 3}, "'completion' is 3; expected a text or a list of messages"),
    ({"messages": {}}, "'messages' is {}; expected a list of messages"),
    (chat(("user", "a")), "none of its 1 message is the assistant's"),
    (chat(("tool", "a"), ("assistant", "b")), "message 1 has the role 'tool': tool calls are not trained; --skip-"),
    ({"messages": [{"role": "user"}]}, "message 1 is {'role': 'user'}; expected a 'role' and a 'content'"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "message 1 has the role"),
    (chat(("narrator", "a"), ("gpt", "b")), "message 1 has the role 'narrator'; expected system, user, assistant"),
    ({"text": " "}, "line 2: it is empty; expected a text"),
    (chat(("user", "a"), ("assistant", " ")), "message 2, an answer, is empty: the model would learn to say"),
    ({"prompt": "a", "completion": ""}, "message 2, an answer, is empty"),
    (weighed(0), "none of its 2 messages has a weight of 1, so nothing would count"),
    (weighed(0.5), "message 2 has the weight 0.5; expected 0 or 1"),
    (weighed("0"), "message 2 has the weight '0'; expected 0 or 1"),
    (weighed(1, "user"), "message 1 has the weight 1; expected 0: answers alone count"),
    (weighed(0, name="weights"), "message 2 has 'weights', which is not read: a message has 'weight', 0 or 1"),
    ({"text": "a", "weight": 0.5}, "it has 'weight', which is not read: an example has no weight of its own"),
    ({**chat(("assistant", "a")), "tools": [{}]}, "it has 'tools', which is not read: tool calls are not trained"),
    (weighed([{}], name="tool_calls"), "message 2 has 'tool_calls', which is not read: tool calls are not trained"),
    (weighed("x", name="reasoning_content"), "message 2 has 'reasoning_content', which is not read: only its con"),
    ({"prompt": "a", "completion": "b", "label": False}, "its 'label' is false, so the answer is not wanted"),
    ({"prompt": "a", "completion": "b", "images": ["c.png"]}, "it has 'images', which is not read: only text is"),
    (chat(("user", [{"type": "image_url"}]), ("assistant", "b")), "message 1 has a part of the type 'image_url'"),
    ({**chat(("assistant", "a")), "text": "b"}, "its messages and its text are two examples; leave"),
    ({"prompt": "a", "output": "b", "response": "c"}, "its prompt, response and its prompt, output are two"),
    ({**chat(("system", "a"), ("assistant", "b")), "system": "c"}, "its 'system' and its first message are two;"),
    ({"prompt": "a", "completion": "\ud800"}, "half of a surrogate pair"),
    ({"instruction": "a", "input": 5, "output": "b"}, "'input' is 5; expected a text"),
    (weighed(True, name="masked"), "message 2 has 'masked', which is not read"),
    (weighed("user", name="from"), "message 2 has 'role' and 'from', which differ"),
    (chat(("user", "a"), ("gpt", [{"type": "text", "text": "b", "weight": 0}])), "has a part with 'weight'"),
    ("\udcff", "position 0: invalid start byte; expected a file in UTF-8"),  # as PowerShell's UTF-16
])  # fmt: skip
def test_a_line_that_is_no_example_is_named(line, words):
    text = line if isinstance(line, str) else json.dumps(line)
    with open("c.jsonl", "wb") as file:
        file.write(b'{"text": "good"}\n' + text.encode(errors="surrogateescape") + b'\n{"text": "good"}\n')
    assert not_loaded(words).startswith("'c.jsonl', line 2: ")
    assert cli.main(["train", "--model", "llama-tiny", "--data", "c.jsonl", "--steps", "1"]) == 2
    assert os.listdir(".") == ["c.jsonl"]


def test_what_is_cut_and_what_is_not_used_is_reported():
    lines({"text": "012345", "id": 1}, {"text": "0123", "id": 2}, {"prompt": "a" * 30, "completion": "b"})
    data = load(T=6, truncate=True)
    r = data.report()
    assert (r["examples"], r["cut"], r["tokens_cut"]) == (3, 1, 52 - 7)
    assert (r["tokens"], r["counted"], r["without_counted"]) == (7 + 5 + 52, 6 + 4, ["'c.jsonl', line 3"])
    assert (r["unused"], r["shapes"]) == ({"id": 2}, {"text": 2, "prompt, completion": 1})
    assert "1 example left out, because no token counts within -T 6: 'c.jsonl', line 3 first" in data.description
    assert "read from text or prompt, completion; " in data.description
    assert "10 of 64 tokens count (16 %)" in data.description
    lines({"prompt": "a" * 30, "completion": "b"})
    not_loaded("no token of any example counts within -T 6; take a larger -T", T=6, truncate=True)


@pytest.mark.parametrize(("asked", "answer", "cut", "words"), [
    (10, 300, 3, ""),
    (10, 300, 4, "cuts 4 of 331 tokens off the ends of 1 example, and with them 3 of the 301 that count; take"),
    (300, 10, 2, "cuts 2 of 331 tokens off the ends of 1 example, and with them 1 of the 11 that count; take"),
])  # fmt: skip
def test_more_than_a_hundredth_of_tokens_or_targets_is_cut_only_if_asked_for(asked, answer, cut, words):
    lines({"prompt": "q" * asked, "completion": "a" * answer})
    longest = load(T=999).report()["longest"]
    if words:
        not_loaded(f"{words} a larger -T (the longest needs {longest - 1}), or --truncate", T=longest - 1 - cut)
    assert load(T=longest - 1 - cut, truncate=bool(words)).report()["tokens_cut"] == cut


@pytest.mark.parametrize("pack", [False, True])
def test_a_long_text_is_split_into_rows_in_which_each_token_is_a_target_once(pack):
    text = "".join(chr(33 + i % 90) for i in range(100))
    lines({"text": text}, {"text": "short"})
    data = load(T=16, pack=pack)
    rows = data.rows("train")
    assert (len(rows), data.report()["split"], data.report()["tokens_cut"]) == (7 if pack else 8, 1, 0)
    pieces = sorted((e for row in rows for e in row if e.number == 1), key=lambda e: -e.size)
    assert Counter(int(i) for e in pieces for i in e.ids[1:]) == Counter(text.encode())
    assert "1 text of more than a row split" in data.description
    whole = load(T=200)
    assert whole.report()["split"] == 0
    assert whole.fingerprint != data.fingerprint  # in earlier versions its text was cut


def test_skipped_examples_are_counted_and_the_first_is_named():
    lines({"text": "a"}, "{", chat(("user", "a"), ("assistant", "")), {"text": "b"})
    data = load(skip_invalid=True)
    assert [e.where for e in sorted(data.train, key=lambda e: e.number)] == ["'c.jsonl', line 1", "'c.jsonl', line 4"]
    assert "2 examples skipped: 'c.jsonl', line 2: it is no JSON" in data.description
    assert len(data.report()["skipped"]) == 2
    lines("{", "{")
    not_loaded("'c.jsonl' has no example: 'c.jsonl', line 1: it is no JSON", skip_invalid=True)


# Split, rows and batches


def test_a_tenth_is_held_out_by_the_lines_alone():
    examples = pairs(57)
    lines(*examples)
    here = load()
    lines(*reversed(examples), name="d.jsonl")
    there = load(name="d.jsonl")
    assert (len(here.val), len(here.train)) == (5, 52)
    assert [e.ids.tolist() for e in here.val] == [e.ids.tolist() for e in there.val]
    assert load(T=24, truncate=True).val[0].ids[:5].tolist() == here.val[0].ids[:5].tolist()
    lines(*pairs(9))
    assert len(load().val) == 0
    lines(*[examples[0]] * 15, *examples[1:6])
    held, train = ({e.ids.tobytes() for e in part} for part in (load().val, load().train))
    assert not held & train


def test_rows_have_every_example_once_and_few_rows_do():
    lines(*({"text": "x" * int(n)} for n in np.random.Generator(np.random.PCG64(0)).integers(1, 30, 300)))
    data = load(T=64, pack=True)
    rows = data.rows("train")
    assert Counter(e.number for row in rows for e in row) == Counter(e.number for e in data.train)
    assert max(sum(e.size for e in row) for row in rows) <= 64
    assert len(rows) <= 1.02 * -(-sum(e.size for e in data.train) // 64)
    assert packed(data.train, 64) == rows
    assert f"packed into {len(rows)} rows of 64 in place of {len(data.train)}, " in data.description
    assert f"one in each row of 64, 76 % padding (--pack: {len(rows)} rows)" in load(T=64).description


@pytest.mark.parametrize("pack", [False, True])
def test_an_epoch_has_every_target_once_in_an_order_that_follows_from_seed_and_epoch(pack):
    lines(*pairs(37))
    data = load(T=100, pack=pack)
    batches = data.batches("train", 4, 100, seed=3)
    n = len(batches)
    for epoch in range(2):
        seen = [batches.at(epoch * n + i) for i in range(n)]
        assert sum(int((b["targets"] >= 0).sum()) for b in seen) == sum(e.targets for e in data.train)
    orders = [np.concatenate([batches.at(epoch * n + i)["tokens"] for i in range(n)]) for epoch in (0, 1)]
    assert not np.array_equal(*orders)
    again = data.batches("train", 4, 100, seed=3)
    assert all(np.array_equal(x, y) for x, y in zip(again.at(n + 1).values(), batches.at(n + 1).values(), strict=True))
    assert not np.array_equal(data.batches("train", 4, 100, seed=4).at(0)["tokens"], batches.at(0)["tokens"])


def test_a_row_has_one_example_and_padding_or_says_where_each_example_starts():
    lines({"text": "abc"}, {"text": "defgh"})
    batch = load(T=12).batches("train", 4, 12).at(0)
    assert sorted(batch["tokens"].tolist()) == sorted([[*b"\ndefg", *[0] * 7], [*b"\nab", *[0] * 9], *[[0] * 12] * 2])
    counted = [[*b"defgh", *[-100] * 7], [*b"abc", *[-100] * 9], *[[-100] * 12] * 2]
    assert sorted(batch["targets"].tolist()) == sorted(counted)
    batch = load(T=12, pack=True).batches("train", 2, 12).at(0)
    assert batch["tokens"][0, :8].tolist() == [*b"\ndefg", *b"\nab"]
    assert batch["targets"].tolist() == [[*b"defgh", *b"abc", *[-100] * 4], [-100] * 12]
    assert batch["starts"].tolist() == [[0] * 5 + [5] * 3 + [8, 9, 10, 11], [*range(12)]]
    assert batch["tokens"].dtype == np.int32


# The command line


def test_show_prints_examples_with_what_counts_in_brackets(capsys):
    lines(chat(*TURNS[:3]), {"text": "plain\x1b[2J"})
    out = printed(capsys, "data", "show", "c.jsonl", "-T", "200")
    assert "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n[[ A zim. <|im_end|>]]\n" in out
    assert "[[plain\ufffd[2J]]" in out
    assert "2 examples to train on, 0 to validate (bytes)" in out
    found = ran(capsys, "data", "show", "c.jsonl", "--limit", "1")
    assert [e["where"] for e in found["shown"]] == ["'c.jsonl', line 1"]
    assert sum(found["shown"][0]["counted"]) == found["shown"][0]["targets"] == len(" A zim. ") + 1
    assert cli.main(["data", "show", "c.txt"]) == 2


def test_show_prints_packed_rows(capsys):
    lines({"text": "abc"}, {"text": "defgh"}, {"text": "ijklmnopq"})
    found = ran(capsys, "data", "show", "c.jsonl", "-T", "9", "--pack")
    assert (found["packed"], found["rows"], found["packed_rows"]) == (True, 2, 2)
    assert [(e["row"], e["start"], e["where"][-1]) for e in found["shown"]] == [(1, 0, "3"), (2, 0, "2"), (2, 5, "1")]
    out = printed(capsys, "data", "show", "c.jsonl", "-T", "9", "--pack", "--limit", "1")
    assert "row 1, from token 0: 'c.jsonl', line 3" in out
    assert "row 2" not in out
    said = refused(capsys, "train", "--model", "llama-tiny", "--steps", "1", "--pack")
    assert "--pack: --data builtin is text, without examples; leave it out" in said


SETTINGS = {"model": "llama-tiny", "data": "c.jsonl", "B": 2, "T": 64, "threads": 1, "variant": "vanilla"}
TRAIN = ["train", "--model", "llama-tiny", "-T", "64", "-B", "2", "--data", "c.jsonl", "--variant", "vanilla"]


def test_a_run_trains_on_answers_only_and_validates_on_them(capsys):
    lines(*pairs(20))
    result = ran(capsys, *TRAIN, "--steps", "2", "--val-every", "1", "--save-every", "2")
    assert set(result["val_loss"]) == {"0", "1", "2"}
    found = ran(capsys, "eval", "--init", result["path"], "--data", "c.jsonl")
    assert abs(found["loss"] - result["val_loss"]["2"]) < 1e-5
    assert found["data"] == "c.jsonl (val)"


def test_a_run_that_is_resumed_in_the_middle_of_an_epoch_is_that_of_an_uninterrupted_one(capsys):
    lines(*pairs(20))
    goes_on(capsys, Path(), *TRAIN, "--val-every", "0", "--pack", refused=["--epochs", "0"], said="--epochs 0")
    lines(*pairs(20)[:-1], {"prompt": "other", "completion": "line"})
    assert "holds other text" in refused(capsys, "train", "--resume", "--runs", "cut", "--steps", "13")


@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-tiny"])
def test_packed_padded_and_one_by_one_give_the_same_gradients(model):
    """Examples of other lengths, in rows of other widths: neither padding nor neighbours in a row change anything."""
    lines(*({"prompt": "q" * n, "completion": "a" * (3 + n % 2)} for n in range(1, 5)))
    config = parse(model)

    def gradients(T, B, micro_batches, pack=False, dropped=False):
        batches = load(T=T, pack=pack).batches("train", B, T)
        named = [batches.at(n) for n in range(micro_batches)]
        inputs = {name: (x.shape, "int32") for name, x in named[0].items()}
        if dropped:
            named[0]["starts"][...] = 0
        how = {"choice": Choice("vanilla"), "micro_batches": micro_batches, "threads": 1, "seed": 1}
        engine = Engine.from_options(config.module(), inputs, progress=lambda *a: None, **how)
        loss = engine.step(lr=0.0, more=named[1:], **named[0]).loss
        return loss, {name: g.copy() for name, g in engine.gradients().items()}

    def apart(some, other):
        return max(np.abs(g - other[1][name]).max() / np.abs(g).max() for name, g in some[1].items())

    padded = gradients(40, 4, 1)
    for T, B, n, pack in ((40, 1, 4, False), (60, 4, 1, False), (40, 2, 2, False), (60, 2, 1, True)):
        found = gradients(T, B, n, pack)
        assert abs(found[0] - padded[0]) < 1e-6 * padded[0]
        assert apart(padded, found) <= 1e-6, (T, B, n, pack)
    assert apart(padded, gradients(60, 2, 1, True, dropped=True)) > 1e-3


def test_two_ranks_share_packed_rows():
    lines(*pairs(20))
    settings = Settings(**SETTINGS, pack=True, total_batch=256, epochs=2)

    def steps(comm):
        job = prepare(settings, comm=comm)
        assert job.settings.steps == len(job.batches)  # of two micro-batches each
        return [job.take_step().loss for _ in range(2)], job.engine.parameters()["model.norm.weight"].tobytes()

    assert Team(2).run(steps) == Team(1).run(steps) * 2


@pytest.mark.parametrize(("how", "steps"), [
    ({}, 3 * 20 / 2), ({"pack": True}, None),
    ({"total_batch": 2 * 64 * 4}, 8),  # 7.5 steps of four batches
    ({"data": "t.txt"}, 3 * (2699 // 128)),
], ids=["padded", "packed", "micro-batches", "text"])  # fmt: skip
def test_epochs_are_the_steps_in_which_all_data_are_seen_so_often(how, steps):
    lines(*pairs(22))  # two of which are held out
    Path("t.txt").write_text("a" * 3000)
    job = prepare(Settings(**SETTINGS | {"epochs": 3, "schedule": "linear"} | how))
    n = len(job.batches)
    assert job.settings.steps == (3 * n if steps is None else steps)
    assert n < 10 or "pack" not in how
    assert 3 * n <= job.settings.steps * job.settings.micro_batches < 3 * n + job.settings.micro_batches


def test_inputs_that_a_model_brings_have_no_epochs():
    with pytest.raises(UserError, match=r"^--epochs 1: the model brings its inputs, which have no end; take --steps"):
        open_data(NamedModel("", SimpleNamespace(inputs=lambda B, T: "given")), **Settings(epochs=1).some(*DATA))


def test_a_run_of_epochs_goes_on_to_more(capsys):
    lines(*pairs(20))
    how = [*TRAIN, "--val-every", "0", "--save-every", "18", "--schedule", "linear"]
    epochs = Path(ran(capsys, *how, "--epochs", "2")["path"])
    config = json.loads((epochs / "config.json").read_text())
    assert (config["epochs"], config["steps"]) == (2, 18)
    assert ran(capsys, "train", "--config", str(epochs / "config.json"), "--dry-run")["steps"] == 18
    for flags, n in ((["--epochs", "3"], 27), (["--steps", "28"], 28), ([], 28)):
        assert f"{n} steps: {n / 9:.3g} epochs of 9 steps" in printed(capsys, "train", "--resume", str(epochs), *flags)
    Path("own.toml").write_text("steps = 3\nepochs = 1\n")
    for flags, words in (
        (["--epochs", "2", "--steps", "3"], "--steps 3 with --epochs 2: expected one of them"),
        (["--config", "own.toml"], "it has steps and epochs; expected one of them"),
        (["--epochs", "2", "--overfit"], "--epochs 2 with --overfit, which trains on one batch"),
        (["--epochs", "1", "--warmup-steps", "9"], "--warmup-steps 9: expected less than the 9 steps of the run"),
    ):
        assert words in refused(capsys, *TRAIN, *flags)

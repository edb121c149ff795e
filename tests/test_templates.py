"""Chat templates: the ids and masks of transformers, what a template may not do, and which one a chat follows."""

import json
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import jinja2
import numpy as np
import pytest
from verbs import error_of, printed, ran, refused

from cpuopt import cli
from cpuopt.data import templates
from cpuopt.data.chats import load_chats
from cpuopt.data.forms import TurnEncoder
from cpuopt.data.shapes import Message
from cpuopt.data.templates import Template, encoder_of, source_of
from cpuopt.data.tokenizers import get_tokenizer
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.files import gguf as container
from cpuopt.generate.chat import Conversation
from cpuopt.isolate import jinja
from cpuopt.isolate.process import Side, Worker
from cpuopt.models import parse
from cpuopt.weights import save_weights

GOLDEN = Path(__file__).parent / "golden"
sys.path.insert(0, str(GOLDEN))
import templates as families  # noqa: E402  (beside the script that makes the values)

EXPECTED, CHATML = json.loads((GOLDEN / "templates.json").read_text("utf-8")), families.plain(families.CHATML)


pytestmark = pytest.mark.usefixtures("here")


def model(template, kind="bytes", special=families.IM, bos=None, eos="<|im_end|>", at="."):
    """Write a tokenizer and what transformers writes beside it; return the tokenizer."""
    folder = Path(at)
    folder.mkdir(exist_ok=True)
    families.tokenizer(kind, special).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos, "eos_token": {"content": eos}}))
    if template is not None:
        (folder / "chat_template.jinja").write_bytes(template if isinstance(template, bytes) else template.encode())
    return get_tokenizer(str(folder / "tokenizer.json"))


def family(name):
    template, kind, special, bos, eos = families.FAMILIES[name]
    return model(families.plain(template), kind, special, bos, eos)


def marked(chat):
    return [Message(role, text, role == "assistant") for role, text in chat]


def said(chat):
    """An example of it."""
    return {"messages": [{"role": role, "content": text} for role, text in chat]}


def run(mask):
    return "".join(str(int(x)) for x in mask)


# As transformers


@pytest.mark.parametrize("name", families.FAMILIES)
def test_ids_and_masks_are_those_of_transformers(name):
    encoder = encoder_of(family(name))
    for chat, expected in zip(families.CHATS, EXPECTED[name], strict=True):
        if message := expected.get("error"):
            assert error_of(encoder.example, marked(chat)) == f"the chat template of 'tokenizer.json': {message}"
            continue
        assert templates.MARKED.sub(r"\1", encoder.render(marked(chat), False)) == expected["text"]
        ids, counted = encoder.example(marked(chat))
        assert ids == expected["ids"]
        if expected["mask"] is not None:
            assert run(counted) == expected["mask"]
        assert encoder.asked([], chat[:-1]) == expected["asked"]
    assert encoder.notes == []
    first, eos = EXPECTED[name][0], encoder.tokenizer.id_of(families.FAMILIES[name][4])
    assert encoder.ends == {eos, first["ids"][first["mask"].rindex("1")]}


THINKS = CHATML.replace("{{ m.content", "{{ ('<think></think>' if loop.last else '') + m.content", 1)
LAST = CHATML.replace("'<|im_start|>' + m.role", "'<|im_start|>' + ('last ' if loop.last else '') + m.role")
TALK = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")]


@pytest.mark.parametrize(
    ("template", "text", "counts"),
    [
        (CHATML, "all of it", ["b<|im_end|>", "d<|im_end|>"]),
        (families.CHATML, "blocks of generation", ["b<|im_end|>", "d<|im_end|>"]),
        (THINKS, "only the last answer of 1 example counts, because the chat", ["<think></think>d<|im_end|>"]),
        (LAST, "writes message 4 otherwise than where it asks for one, so a model cannot learn it;", None),
    ],
)
def test_a_template_that_rewrites_earlier_turns_is_trained_on_its_last_answer(template, text, counts):
    """Also if another turn follows, with which the template would rewrite that one too."""
    tokenizer = model(template)
    lines(said(TALK))
    if counts is None:
        assert error_of(load).startswith(f"'c.jsonl', line 1: the chat template of 'tokenizer.json' {text}")
        return
    data = load()
    (example,) = data.train
    assert [words for counted, words in example.runs(tokenizer) if counted] == counts
    assert (text in data.description) == (len(counts) == 1)


TURNS = "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
AGAIN = "{% endfor %}{% if not add_generation_prompt %}{{messages[0].content}}{% endif %}"


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (f"{TURNS}{{% endfor %}}{PROMPT}", "d<|im_end|>"),
        (TURNS + "{% if m.role == 'assistant' %}<|im_start|>user\n{% endif %}{% endfor %}" + PROMPT, "d<|im_end|>"),
        (TURNS + AGAIN + PROMPT, "d<|im_end|>"),
        ("{% if not add_generation_prompt %}" + TURNS + "{% endfor %}{% endif %}", None),
    ],
    ids=["usual", "the next turn begins", "the question comes again", "a prompt without what was said"],
)
def test_an_answer_is_what_was_said_and_its_end(template, answer):
    tokenizer, chat = model(template), marked([("user", "secret"), ("assistant", "d")])
    if answer is None:
        assert "otherwise than where it asks for one" in error_of(encoder_of(tokenizer).example, chat)
        return
    ids, counted = encoder_of(tokenizer).example(chat)
    assert tokenizer.decode([i for i, c in zip(ids, counted, strict=True) if c]) == answer


def test_a_message_that_does_not_count_is_read_only():
    encoder = encoder_of(model(CHATML))
    turns = [("user", "a", False), ("assistant", "b", False), ("user", "c", False), ("assistant", "d", True)]
    _, counted = encoder.example([Message(*turn) for turn in turns])
    assert (sum(counted), encoder.notes) == (len("d") + 1, [])


def lines(*examples):
    Path("c.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in examples))


def load(T=256, **how):
    return load_chats([Path("c.jsonl")], name="c.jsonl", vocab_size=512, T=T, tokenizer="tokenizer.json", **how)


# What a template may not do

DEEP, GLOBALS = "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "__init__.__globals__"
FOR, END, FULL = "{% for i in range(99999) %}", "{% endfor %}", "it needs more than 512 MB of memory"
LIMITED = {
    "an endless loop": (f"{FOR}{FOR}{END}{END}", "no answer to"),
    "a text times a number": ("{{ 'a' * 10 ** 10 }}", FULL),
    "a text that is doubled": ("{% set n = namespace(a='aa') %}" + FOR + "{% set n.a = n.a ~ n.a %}" + END, FULL),
    "a list joined": ("{{ (range(99999) | list * 9999) | join(messages[0].content * 9999) }}", FULL),
    "ljust": ("{{ 'a'.ljust(10 ** 12) }}", FULL),
    "format's width": ("{{ '%9999999999d' % 1 }}", FULL),
    "a date": ("{{ strftime_now('%Y' * 10 ** 9) }}", FULL),
    "a power": ("{{ 9 ** (9 ** 9) }}", "no answer to"),
    "a macro of itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "it is nested too deeply"),
    "parentheses": (DEEP, "it is nested too deeply"),
    "blocks": ("{% if 1 %}" * 300 + "x" + "{% endif %}" * 300, "it is nested too deeply"),
    "no text": (b"{{ '\xff' }}", "is no UTF-8"),
    "a large file": ("x" * (1 << 20 | 1), "has 1,048,577 characters; expected 1,048,576 at most"),
}
"""Templates that the process and its limits stop, and a word of the line that refuses each."""
HOSTILE = {
    "a long text": ("{% for i in range(99999) %}{{ 'a' * 99 }}{% endfor %}", "it makes more than 2,097,152 characters"),
    "a long range": ("{{ range(10 ** 12) | list }}", "Range too big"),
    "a class": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "globals": (f"{{{{ cycler.{GLOBALS}.os.system('touch ran') }}}}", "unsafe"),
    "globals of a function": ("{{ raise_exception.__globals__['os'].system('touch ran') }}", "unsafe"),
    "globals of a method": (f"{{{{ self.{GLOBALS} }}}}", "unsafe"),
    "joiner": (f"{{{{ joiner.{GLOBALS}['os'].system('touch ran') }}}}", "unsafe"),
    "an attribute by a filter": ("{{ (''|attr('__class__')).mro() }}", "unsafe"),
    "attributes of a list": ("{{ messages|map(attribute='__class__.__mro__')|list }}", "unsafe"),
    "a format": (f"{{{{ '{{0.{GLOBALS}}}'.format(cycler) }}}}", "unsafe"),
    "a name of a namespace": ("{% set n = namespace(__html__=messages) %}", "a namespace cannot have '__html__'"),
    "an import": ("{% import 'os' as os %}{{ os.system('touch ran') }}", "no loader"),
    "an include": ("{% include '/etc/passwd' %}", "no loader"),
    "extends": ("{% extends '/etc/passwd' %}", "no loader"),
    "append": ("{% set x = messages.append(1) %}", "unsafe"),
    "pop": ("{{ messages.pop() }}", "unsafe"),
    "update": ("{{ messages[0].update({'role': 'system'}) }}", "unsafe"),
    "an undefined name": ("{{ nothing.at.all }}", "'nothing' is undefined"),
    "no template": ("{% if", "line 1: unexpected 'end of template'"),
    "a file of Jinja's": ("{{ lipsum() }}", "OSError"),
}
"""Templates that the sandbox stops, as does the process that cannot open files."""


@pytest.mark.parametrize("name", LIMITED)
def test_a_template_that_fills_the_machine_is_refused_in_a_line(name, monkeypatch, capfd):
    template, words = LIMITED[name]
    monkeypatch.setattr(templates, "LIMIT_S", 0.7 if words == "no answer to" else 10.0)
    said = error_of(lambda: encoder_of(model(template)).render([("user", "hi", False)], True))
    assert (said[:21], len(said) < 600, capfd.readouterr()) == ("the chat template of ", True, ("", ""))
    assert words in said


def test_a_hostile_template_is_refused_in_a_line_and_runs_nothing(capfd):
    """One process renders them all: what one of them does would be there for the next."""
    with Worker(Side.module("t", "cpuopt.isolate.jinja"), limit_s=60) as worker:
        worker.ask("confine")

        def render(template):
            worker.ask("load", template=template, variables={})
            worker.ask("render", messages=[{"role": "user", "content": "hi"}], stretches=[(0, 1, True)])

        for template, words in HOSTILE.values():
            said = error_of(render, template)
            assert (said[:3], len(said) < 600) == ("t: ", True)
            assert words in said
    assert not Path("ran").exists()
    assert capfd.readouterr() == ("", "")


def escapes(environment):
    """The hostile templates that walk to Python's own objects and are not stopped."""
    found = []
    for name, (template, words) in HOSTILE.items():
        if words == "unsafe" and "touch" not in template:
            with suppress(jinja2.TemplateError, UserError):
                jinja.renderer(template, environment)(messages=[{"role": "user", "content": "hi"}])
                found.append(name)
    return found


def test_without_the_sandbox_templates_get_out():
    assert escapes(jinja.ImmutableSandboxedEnvironment) == []
    assert {"a class", "globals of a method", "a format", "append"} <= set(escapes(jinja2.Environment))
    assert {"append", "pop", "update"} <= set(escapes(jinja2.sandbox.SandboxedEnvironment))


OUT = "cycler.__init__.__globals__['__builtins__']"
IMPORTED = ("('socket').socket()", "('os').pipe()", "('subprocess').run('true')")
OPENS = [f"{OUT}['open']('/proc/self/stat')", *(f"{OUT}['__import__']{call}" for call in IMPORTED)]


@pytest.mark.parametrize("confined", [True, False])
def test_a_process_that_renders_opens_nothing_even_without_its_sandbox(confined):
    code = "import socket, subprocess, jinja2; from cpuopt.isolate import jinja; answers = jinja.Answers(); "
    code += "jinja.renderer.__defaults__ = (jinja2.Environment,); "
    code += "jinja.serve({name: getattr(answers, name) for name in ('confine', 'load', 'render')})"
    with Worker(Side("open", (sys.executable, "-c", code)), limit_s=60) as worker:
        worker.ask("confine") if confined else None
        for template in OPENS:
            worker.ask("load", template=f"{{{{ {template} }}}}", variables={})
            with pytest.raises(UserError, match="Too many open files") if confined else nullcontext():
                assert worker.ask("render", messages=[], stretches=[(0, 0, False)])["texts"][0][1]


def test_the_time_of_all_chats_is_limited(monkeypatch):
    monkeypatch.setattr(templates, "EACH_S", 0.01)
    monkeypatch.setattr(templates, "LIMIT_S", 1.0)
    encoder = encoder_of(model("{% for i in range(9999) %}{% for j in range(99) %}{% endfor %}{% endfor %}"))
    with pytest.raises(UserError, match="no answer to 'render' within"):
        [encoder.render([("user", "hi", False)], True) for _ in range(1000)]


# Which template, and without Jinja


CONFIG = {"string": CHATML, "list": [{"name": "tools", "template": "x"}, {"name": "default", "template": CHATML}]}


def config(template):
    path = Path("tokenizer_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


@pytest.mark.parametrize("where", ["string", "list", "file", "gguf", "adapter"])
def test_a_template_is_found_wherever_files_have_it(where):
    tokenizer, adapters = model(CHATML if where == "file" else None), []
    if where in CONFIG:
        config(CONFIG[where])
    if where == "file":
        config("of less weight")
    if where == "adapter":
        config("of the base")
        model(CHATML, at="adapter", eos="<|endoftext|>")
        adapters = [Path("adapter")]
    if where == "gguf":
        about = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.eos_token_id": 2}
        about["tokenizer.ggml.tokens"] = ["a", *families.IM]
        about["tokenizer.ggml.token_type"] = np.array([1, 3, 3, 3], np.int32)
        about |= {"tokenizer.chat_template": CHATML, "tokenizer.ggml.merges": [], "general.architecture": "llama"}
        Path("m.gguf").write_bytes(container.header(about, {}))
        tokenizer = get_tokenizer("m.gguf")
    source = source_of(tokenizer, adapters)
    assert source.text == CHATML
    assert source.special == {"eos_token": {"adapter": "<|endoftext|>"}.get(where, "<|im_end|>")}
    assert isinstance(encoder_of(tokenizer, adapters=adapters), Template)
    assert isinstance(encoder_of(tokenizer, "chatml"), TurnEncoder)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (3, "is 3; expected a text, or a list of names and templates"),
        ([{"name": "default"}], "expected a text, or a list of names and templates"),
        ([{"name": "rag", "template": "x"}], "has chat templates 'rag'; expected one of them to be called 'default'"),
    ],
)
def test_what_is_no_template_is_refused(found, words):
    tokenizer = model(None)
    config(found)
    assert words in error_of(encoder_of, tokenizer)


def test_without_jinja_a_form_can_be_named(monkeypatch):
    monkeypatch.setattr(templates.metadata, "version", lambda name: "3.1.5")
    tokenizer = model(CHATML)
    needs = "the chat template of 'tokenizer.json' needs the library jinja2, 3.1.6 or later; pip install "
    assert error_of(encoder_of, tokenizer).startswith(needs)
    assert isinstance(encoder_of(tokenizer, "chatml"), TurnEncoder)


# Chats and the command line


class Reader:
    """A model that notes what it reads."""

    config, position, context = None, 0, 999

    def __init__(self):
        self.tokens = []


@pytest.fixture
def answers(monkeypatch):
    """Replies of a model, in order; each token but the last is read, as a decoder does."""
    said = []

    def generate(decoder, ids, sampler, most, ends):
        answer = said.pop(0)
        decoder.tokens = [*decoder.tokens[: decoder.position], *ids, *answer[:-1]]
        decoder.position = len(decoder.tokens)
        yield from answer

    monkeypatch.setattr("cpuopt.generate.chat.check_tokens", lambda *a: None)
    monkeypatch.setattr("cpuopt.generate.chat.generate", generate)
    return said


@pytest.mark.parametrize("name", ["qwen2", "llama2", "phi3", "rewriting"])
def test_a_conversation_is_what_other_programs_send(name, answers):
    """Also for a template that writes earlier turns otherwise: the model then reads from there on again."""
    encoder = encoder_of(model(THINKS) if name == "rewriting" else family(name))
    talk, chat = Conversation(Reader(), encoder, "Be odd."), [("system", "Be odd.")]
    for said, answer in (("What?", "hello"), ("And?", "É 🙂"), ("So?", "")):
        chat.append(("user", said))
        answers.append(encoder.tokenizer.encode(answer))
        list(talk.reply(said, None, 99))
        whole = encoder.asked([], chat)
        assert talk.decoder.tokens[: len(whole)] == whole
        chat.append(("assistant", answer))


def test_show_prints_what_the_template_makes_and_a_system_turn_for_chats_without_one(capsys):
    model(families.plain(families.FAMILIES["qwen2"][0]))
    lines({"prompt": "What?", "completion": "That."}, said(families.CHATS[1]))
    show = ["data", "show", "c.jsonl", "--tokenizer", "tokenizer.json"]
    out = printed(capsys, *show)
    assert "<|im_start|>system\nYou are a helper.<|im_end|>\n<|im_start|>user\nWhat?" in out
    assert "<|im_start|>assistant\n[[That.<|im_end|>]]\n" in out
    out = printed(capsys, *show, "--system", "Be brief.")
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat?" in out
    assert "<|im_start|>system\nBe odd.<|im_end|>" in out
    Path("chat_template.jinja").write_text("{{ raise_exception('Only after dark') }}")
    assert "'c.jsonl', line 1: the chat template of 'tokenizer.json': Only after dark" in refused(capsys, *show)
    line = refused(capsys, "train", "--model", "gpt2-tiny", "--steps", "1", "--system", "x")
    assert "--system: --data builtin is text, without examples" in line


def test_verbs_take_the_template_of_the_model(capsys):
    """Prompts, what a run trains on and what `eval` measures are the ids that the template makes."""
    sizes = {"model": "llama", "vocab_size": 512, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256}
    config = parse(json.dumps(sizes))
    engine = Engine.from_options(config.module(), config.specs(1, 8), train=False)
    save_weights(Path("base"), config, engine.parameters().__getitem__)
    encoder = encoder_of(model(families.plain(families.FAMILIES["qwen2"][0]), at="base"))
    chat = [("system", "S"), ("user", "What?"), ("assistant", "That.")]
    how, system = ["--init", "base", "--variant", "vanilla"], ["--system", "S"]
    generate = ["generate", *how, "--chat", "--prompt", "What?", "--max-tokens", "3", *system]
    assert ran(capsys, *generate)["prompt_tokens"] == len(encoder.asked([], chat[:2]))
    lines({"prompt": "What?", "completion": "That."})
    ids, counted = encoder.example(marked(chat))
    assert cli.main(["train", *how, "--data", "c.jsonl", "-T", "200", "-B", "1", "--steps", "1", *system]) == 0
    assert f"{sum(counted)} of {len(ids)} tokens count" in " ".join(" ".join(capsys.readouterr()).split())
    assert ran(capsys, "eval", *how, "--data", "c.jsonl", "-T", "200", *system)["tokens"] == sum(counted)


def test_a_date_is_that_of_the_build_if_one_is_set(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert encoder_of(model("{{ strftime_now('%d %b %Y') }}")).render([("user", "a", False)], True) == "02 Jan 1970"

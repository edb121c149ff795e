"""Inputs that are made to end a command in a traceback: each is refused in one line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuopt import cli, data, models
from cpuopt.data import corpus, tokenizers
from cpuopt.errors import UserError
from cpuopt.models.gpt2 import PRESETS
from cpuopt.report.backward import html
from cpuopt.train import checkpoint, job, settings

ROOT = Path(__file__).parents[1]
BIG = "1" + "0" * 400


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"n_layer":' * 100_000, "nested more than"),
        ('{"n_layer": ' + "[" * 200 + "]" * 200 + "}", "nested more than"),
        ('{"n_layer": 2, "n_layer": 3}', "'n_layer' comes twice"),
        ('{"n_layer": NaN}', "NaN is no number"),
        ('{"n_layer": ' + BIG + "}", "expected a whole number"),
        ('{"n_layer": ' + "1" * 5000 + "}", "not JSON"),
        ('{"\\u001b[31m": 1}', "unknown size"),
        ("{" * 10_000, "not JSON"),
    ],
)
def test_a_model_that_is_no_model(text, why):
    with pytest.raises(UserError, match=why) as e:
        models.parse(text)
    assert len(str(e.value)) < 300
    assert str(e.value).isprintable()


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("a.toml", f"lr = {BIG}", "lr is 1000000"),
        ("a.toml", "lr = nan", "lr is nan; expected a number between -1e+300 and 1e+300"),
        ("a.toml", f"steps = {BIG}", "steps is 1000000"),
        ("a.toml", "lr = 1\nlr = 2", "Cannot overwrite a value"),
        ("a.toml", "x = " + "[" * 50_000, "expected TOML"),
        ("a.toml", "lr = '''\n\x1b[31m'''", "expected TOML"),
        ("a.toml", "kernels = [1]", "kernels[0] is 1"),
        ("a.json", '{"lr": 1, "lr": 2}', "'lr' comes twice"),
        ("a.json", '{"lr":' * 10_000, "nested more than"),
        ("a.json", '{"lr": {"a": 1}}', "lr is {'a': 1}; expected a number"),
        ("a.json", "[]", "it is a list"),
    ],
)
def test_a_config_that_is_none(file, text, why, capsys):
    Path(file).write_text(text)
    assert cli.main(["train", "--model", "gpt2-tiny", "--config", file]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line
    assert len(line) < 400


def test_a_config_is_still_read():
    Path("a.toml").write_text("lr = 1\nB = 2\nkernels = []\nclip = 1.5\n")
    assert settings.read(Path("a.toml")) == {"lr": 1, "B": 2, "kernels": (), "clip": 1.5}


@pytest.mark.parametrize(
    ("name", "value"), [("NUMBA_DISABLE_JIT", "1"), ("NUMBA_THREADING_LAYER", "foo"), ("NUMBA_THREADING_LAYER", "")]
)
def test_numba_set_to_what_cannot_work(name, value, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    assert cli.main(["train", "--model", "gpt2-tiny"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"cpuopt: {name}")
    assert "unset it" in line


@pytest.mark.parametrize("words", ["train --model gpt2-tiny --steps 1", "check gelu --quick", "machine", "warmup"])
def test_a_threading_layer_that_is_not_installed(words):
    without = "import sys; sys.modules['numba.np.ufunc.tbbpool'] = None; from cpuopt import cli; sys.exit(cli.main())"
    env = os.environ | {"NUMBA_THREADING_LAYER": "tbb", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", without, *words.split()], env=env, capture_output=True, text=True, check=False
    )
    asked = "cpuopt: NUMBA_THREADING_LAYER=tbb: its library is not installed; unset it, or take omp or workqueue\n"
    assert (done.returncode, done.stderr) == (2, asked)


def test_a_nul_byte_anywhere_is_no_text(monkeypatch):
    monkeypatch.setattr(corpus, "PIECE", 1000)
    whole = bytearray(b"some text\n" * 20_000)
    Path("a.txt").write_bytes(whole)
    assert data.load_corpus("a.txt", vocab_size=256, T=8, B=1).n_tokens == len(whole)
    for at in (0, 70_000, 131_072, len(whole) - 1):
        Path("a.txt").write_bytes(whole[:at] + b"\0" + whole[at + 1 :])
        with pytest.raises(UserError, match="is not text") as e:
            data.load_corpus("a.txt", vocab_size=256, T=8, B=1)
        assert at == 0 or f"byte {at} is NUL" in str(e.value)


@pytest.mark.parametrize("kind", ["tampered", "short", "folder", "pipe", "loop", "missing"])
def test_a_vocabulary_that_is_not_the_published_one(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    (place,) = tokenizers.vocabulary_places()
    make = {
        "tampered": lambda: place.write_bytes(b"IQ== 0\n" * (tokenizers.GPT2_VOCABULARY.size // 7)),
        "short": lambda: place.write_bytes(b""),
        "folder": place.mkdir,
        "pipe": lambda: os.mkfifo(place),
        "loop": lambda: place.symlink_to(place),
        "missing": lambda: None,
    }
    make[kind]()
    with pytest.raises(UserError, match="missing or damaged; run `cpuopt data prepare"):
        tokenizers.get_tokenizer("gpt2")
    assert not tokenizers.GPT2_VOCABULARY.is_at(place)


# A checkpoint's state


STATE = {
    "step": 3, "updates": 3, "model": "gpt2-tiny", "sizes": vars(PRESETS["gpt2-tiny"]), "corpus": "0" * 8,
    "settings": vars(job.Settings()), "val": {"0": 5.0, "3": None}, "tokenizer": "bytes",
    "guard": {"skipped": 0, "recent": [False], "windows": {"loss": [5.0], "grad_norm": [1.0]}},
}  # fmt: skip


def saved(state):
    """A checkpoint whose checksums are right, whatever its state."""
    path = Path("run", checkpoint.FOLDER, "step-00000003")
    path.mkdir(parents=True, exist_ok=True)
    written = {}
    for name in (*checkpoint.TENSORS["adamw"], checkpoint.STATE):
        content = json.dumps(state).encode() if name == checkpoint.STATE else b"x"
        (path / name).unlink(missing_ok=True)
        written[name] = checkpoint._write(path / name, iter([content]))
    (path / checkpoint.MANIFEST).write_text(json.dumps({"step": 3, "files": written}))
    return path


OTHER = [None, 0, -1, "x", [], {}, True, 1e308, [[]], {"x": 1}]


@pytest.mark.parametrize("name", STATE)
def test_a_state_with_other_types_is_refused(name):
    assert checkpoint.verify(saved(STATE)).state == json.loads(json.dumps(STATE))
    inner = STATE[name] if isinstance(STATE[name], dict) else {}
    changed = [{**STATE, name: x} for x in OTHER]
    changed += [{**STATE, name: {**inner, k: OTHER[i % len(OTHER)]}} for i, k in enumerate(inner)]
    refused = 0
    for state in [*changed, {k: v for k, v in STATE.items() if k != name}]:
        try:
            found = checkpoint.verify(saved(state))
            job.resumed(found, {})
        except UserError:
            refused += 1
    assert refused > len(changed) * 0.4 or name in ("tokenizer", "settings", "model", "corpus", "updates")


@given(st.sampled_from([*STATE, "other"]), st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=4))
def test_a_state_is_taken_or_refused(tmp_path_factory, name, x):
    os.chdir(tmp_path_factory.mktemp("state"))
    try:
        found = checkpoint.verify(saved({**STATE, name: x}))
        settings = job.resumed(found, {})
        assert isinstance(settings, job.Settings)
        assert np.isfinite(settings.lr)
    except UserError:
        pass


# What is written


def test_the_page_of_a_generated_backward_escapes_names(monkeypatch):
    from cpuopt import ops
    from cpuopt.kernels import registry
    from cpuopt.kernels.generated.load import backward

    made = backward(ops.ALL["gelu_backward"], registry.KERNELS["gelu_forward", "vanilla"])
    monkeypatch.setattr(made.plan.kernel, "name", "<script>alert(1)</script>")
    made.plan.kernel.source[1] = "</span><img src=x>"
    page = html([made])
    assert page.count("<script>") == 1
    assert "<img" not in page


def test_a_second_sigterm_ends_at_once():
    code = (
        "import time\nfrom cpuopt.isolate.process import ended_by_sigterm\n"
        "with ended_by_sigterm():\n    try:\n        print('up', flush=True)\n        time.sleep(60)\n"
        "    finally:\n        print('cleaning', flush=True)\n        time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        for word in ("up", "cleaning"):
            assert process.stdout.readline().strip() == word
            process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        assert process.wait(30) == -signal.SIGTERM
        assert time.monotonic() - start < 20

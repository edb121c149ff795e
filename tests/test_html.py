"""The HTML report, opened in a headless browser where there is one."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from cpuopt import registry
from cpuopt.engine import Engine
from cpuopt.errors import UserError
from cpuopt.job import specs
from cpuopt.models.gpt2 import GPT2, PRESETS
from cpuopt.profiler import Profiler
from cpuopt.report import html
from cpuopt.roofline import Level, Roofs

HOSTILE = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"
ROOFS = Roofs(1, (Level("memory", None),), 1e3, {"memory": {"read": 50.0}}, 1.0)
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def data():
    choice = registry.Choice("vanilla")
    engine = Engine(GPT2(PRESETS["gpt2-tiny"]), specs(2, 8), choice=choice)
    profiler = Profiler(engine)
    tokens = np.zeros((2, 8), np.int32)
    for _ in range(2):
        with profiler.step():
            engine.step(tokens=tokens, targets=tokens)
    p = profiler.profile(model=HOSTILE, B=2, T=8, choice=choice, roofs=ROOFS, doubts=[HOSTILE])
    p.layers[0] = type(p.layers[0])(**{**vars(p.layers[0]), "layer": HOSTILE, "variant": HOSTILE})
    return html.profile_data(p, engine.program, engine.plan, [3.0, 2.5, float("nan"), 2.0])


def test_the_page_has_all_the_data_and_asks_for_nothing(data):
    text = html.page(data)
    (held,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert json.loads(held)["timeline"] == data["timeline"]
    assert "<" not in held
    assert set(re.findall(r"https?://[^'\"\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(src|href)\s*=\s*[\"']?(?!x )", text.replace(held, ""))
    assert "default-src 'none'" in text
    assert text.count("<script") == 2


def test_what_is_gathered(data):
    assert {c["block"] for c in data["timeline"]} >= {"h.0", "h.1", "wte", "ln_f"}
    assert [p["name"] for p in data["phases"]] == ["forward", "backward", "norm", "update"]
    assert all(c["start"] <= c["end"] for c in data["timeline"])
    ends = [v["offset"] + v["bytes"] for v in data["arena"]["values"]]
    assert max(ends) <= data["arena"]["total"]
    assert all(0 <= v["first"] <= v["last"] < data["arena"]["calls"] for v in data["arena"]["values"])


def test_a_file_that_cannot_be_written(data, tmp_path):
    with pytest.raises(UserError, match=r"--html .* cannot be written"):
        html.write(tmp_path / "none" / "x.html", data)
    html.write(tmp_path / "x.html", data)
    assert [p.name for p in tmp_path.iterdir()] == ["x.html"]


@pytest.mark.skipif(not BROWSER, reason="no browser")
def test_in_a_browser(data, tmp_path):
    file = tmp_path / "x.html"
    html.write(file, data)
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "CONSOLE" not in done.stderr
    dom = done.stdout
    assert 'data-done="yes"' in dom
    assert dom.count("<svg") == 4
    assert "One step, by layer" in dom
    assert "<title>run" not in dom
    body = dom[dom.index("<h1") :]
    assert "&lt;script&gt;document.title='run'&lt;/script&gt;" in body
    assert "<img" not in body

"""Lines of running kernels by samples, on kernels whose costs are known."""

import json
import os
import platform
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import llvmlite.binding as llvm
import numpy as np
import pytest
from test_html import read, violations
from verbs import error, printed, ran, refused

from cpuopt import cli, kernels
from cpuopt.errors import UserError
from cpuopt.kernels import registry
from cpuopt.kernels.compile import line_table, places
from cpuopt.kernels.compile.jit import code_digest
from cpuopt.kernels.compile.sampling import ThreadSampler, unavailable
from cpuopt.kernels.toolkit import regions
from cpuopt.kernels.toolkit.threads import set_threads
from cpuopt.measure import lines
from cpuopt.report.html import heat, threads
from cpuopt.report.html.svg import short

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "here")

FILE = '''
import numpy as np
from numba import prange
from cpuopt import kernel, ops
from cpuopt.kernels.compile.jit import helper

A, B = np.float32(0.5), np.float32(1.5)  # a chain of divisions takes as long, however a loop is compiled

@helper()
def heavy(x, n):
    for _ in range(3 * n):  # heavy
        x = A / (x + B)  # heavy
    return x

@helper()
def nothing(x):
    """Do nothing, which numba cannot mark with lines by itself."""

@kernel(ops.residual_forward, "split")
def residual_forward(out, inp1, inp2):
    for i in prange(len(out)):
        n = np.int64(inp2[i])
        x = heavy(inp1[i], n)  # call
        for _ in range(n):  # light
            x = A / (x + B)  # light
        out[i] = x

@kernel(ops.residual_forward, "late")
def residual_forward(out, inp1, inp2):
    n = np.int64(inp2[0])
    for i in prange(len(out)):
        x = inp1[i]
        nothing(x)
        for _ in range(n if i == len(out) - 1 else 1):  # late
            x = A / (x + B)  # late
        out[i] = x

@kernel(ops.residual_forward, "libm")
def residual_forward(out, inp1, inp2):
    n = np.int64(inp2[0])
    for i in prange(len(out)):
        x = inp1[i]
        for _ in range(n):
            x = np.tanh(x + A)
        out[i] = x

@kernel(ops.residual_forward, "python", jit=False)
def residual_forward(out, inp1, inp2):
    for i in range(len(out)):
        x = float(inp1[i])
        for _ in range(int(inp2[0]) // 100):
            x = x * 0.5 + 1.0
        out[i] = x
'''
N = 30_000


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    kernels.load_all([tmp_path / "mine.py"])
    set_threads(2)
    return tmp_path / "mine.py"


def sample(variant, seconds=0.4):
    """Sample a kernel for some CPU time; return its lines."""
    kernel = registry.find("residual_forward", variant)
    kernel.compile()
    out, inp1 = np.zeros(64, np.float32), np.full(64, 5.0, np.float32)
    inp2 = np.random.default_rng(0).integers(N // 2, 2 * N, 64).astype(np.float32)  # no period that the tick may meet
    kernel.function(out, inp1, inp2)  # which starts the threads
    with ThreadSampler() as sampler:
        sampler.mark[0] = 0
        end = time.process_time() + 2 * seconds
        while time.process_time() < end:
            kernel.function(out, inp1, inp2)
        samples = sampler.take()
    (found,) = lines.by_line(samples, [SimpleNamespace(call=SimpleNamespace(op=kernel.op), kernel=kernel)], [kernel])
    return found


def shares(found, *marks):
    """Return k and n for the samples of lines with a comment."""
    counted = [sum(r.samples for r in found.rows if f"# {m}" in r.text) for m in marks]
    return counted, sum(counted)


def test_shares_hold_the_truth_and_name_the_inlined_chain(mine):
    found = sample("split", 0.5)
    (heavy, light), n = shares(found, "heavy", "light")
    assert n > 0.8 * (found.samples - sum(r.samples for r in found.rows if not r.file))
    assert n > 100
    assert abs(heavy / n - 0.75) < 3.3 * np.sqrt(0.75 * 0.25 / n), (heavy, light)  # 3 : 1, of independent samples
    row = next(r for r in found.rows if r.text.endswith("# heavy"))
    assert (row.function, Path(row.file)) == ("heavy", mine)
    call = 1 + next(i for i, text in enumerate(FILE.splitlines()) if text.endswith("# call"))
    assert (row.chain[0], found.functions[0].function) == (f"{mine}:{call} residual_forward", "residual_forward")
    assert found.codes == [code_digest(registry.find("residual_forward", "split"))]


def test_a_late_chunk_shows_its_thread_and_its_line(mine):
    found = sample("late")
    rows = [r for r in found.rows if r.text.endswith("# late")]
    by_thread = np.sum([r.threads for r in rows], axis=0)
    assert max(by_thread) > 0.9 * sum(by_thread)
    assert sum(by_thread) > 0.9 * sum(r.samples for r in found.rows if r.file)


def test_the_slowest_calls_show_each_thread_and_its_samples(mine):
    regions.watch()
    kernel = registry.find("residual_forward", "late")
    kernel.compile()
    x, n = np.zeros((2, 64), np.float32), 12
    work = [np.full(64, 400 * N if i == 7 else N, np.float32) for i in range(n)]
    kernel.function(*x, work[0])
    call = SimpleNamespace(call=SimpleNamespace(op=kernel.op, layer="h.0"), kernel=kernel)
    slowest, parts = lines.Slowest(), regions.PartLog()
    with ThreadSampler() as sampler:
        sampler.mark[0] = 0
        marks = [time.perf_counter_ns()]
        for i in range(n):
            kernel.function(*x, work[i])
            marks.append(time.perf_counter_ns())
        samples, ran = sampler.take(), parts.take()
        ran[:, 0] = sampler.number(ran[:, 0])
    assert (sampler.number(np.array([threading.get_ident(), 5])) == [0, -1]).all()
    for step in range(2):
        slowest.add(step, [([call] * 6, np.array(marks[6 * step : 6 * step + 7]))], samples, ran)
    (found,) = lines.by_line(samples, [call], [kernel], slowest=slowest)
    took = np.diff(marks)
    assert [(c.step, c.us) for c in found.slowest] == [(i // 6, took[i] / 1e3) for i in np.argsort(-took)[:3]]
    first = found.slowest[0]
    assert first.us == took[7] / 1e3
    for slow in found.slowest:
        assert all(0 <= a <= b <= slow.us for t in slow.threads for a, b in t.parts)
        assert all(0 <= at <= slow.us for t in slow.threads for at, _ in t.samples)
    assert sum(len(t.parts) for t in first.threads) == 2
    busy, idle = sorted((t for t in first.threads if t.parts), key=lambda t: t.parts[0][0] - t.parts[0][1])
    (start, end), (a, b) = busy.parts[0], idle.parts[0]
    assert end - start > 0.5 * first.us
    assert b - a < 0.5 * (end - start)
    seen = [first.places[place] for at, place in busy.samples if start < at < end]
    at = [1 + i for i, text in enumerate(FILE.splitlines()) if text.endswith("# late")]
    assert len(seen) > 5
    assert sum(place in [f"{mine}:{n} residual_forward" for n in at] for place in seen) > 0.9 * len(seen)
    page = read(heat([found])).one("details")
    tips = [r.one("title").text for picture in [*page.all("svg")][:1] for r in picture.all("rect")]
    assert sum("part of a parallel loop" in tip for tip in tips) == 2
    assert len(tips) == 2 + sum(len(t.samples) for t in first.threads)
    assert f"h.0 in step 1: {short(first.us / 1e3)} ms" in page.text
    used = {threads.kind_of(place) for slow in found.slowest for place in slow.places}
    assert [li.text for li in page.all("li")] == [threads.MEANING[k] for k in threads.KINDS if k in {*used, "part"}]


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        *(("/home/me/mine.py:12 f", threads.LINE), ("/home/me/notebook:12 ", threads.LINE)),
        *(("waiting (libgomp)", threads.WAITING), ("math functions (libm)", threads.MATH)),
        *(("f (lines unknown)", threads.OTHER), ("Python", threads.OTHER)),
    ],
)
def test_a_sample_has_the_colour_of_its_place(place, kind):
    assert threads.kind_of(place) == kind
    call = lines.SlowCall(layer="<h>", step=1, us=12.5, places=[place], threads=[])
    call = replace(call, threads=[lines.ThreadTimes(thread=t, parts=[], samples=[(3.0, 0)]) for t in (0, 4, -1)])
    assert threads.slow_calls(SimpleNamespace(slowest=[])) is None
    page = read(threads.slow_calls(SimpleNamespace(slowest=[call])))
    assert [r.attrs["class"] for r in page.all("rect")] == [kind] * 3
    assert [t.text for t in page.all("text", class_="row")] == ["main", "thread 4", "others"]
    assert "<h> in step 1: 12.5 µs" in page.text


def test_a_kernel_bound_by_libm_shows_it(mine):
    found = sample("libm")
    row = next(r for r in found.rows if r.function == "math functions (libm)")
    assert row.samples > 0.5 * sum(r.samples for r in found.rows if not r.function.startswith(lines.WAITS))


def test_a_kernel_in_python_has_no_line(mine):
    found = sample("python")
    assert ([r for r in found.rows if r.file], found.rows[0].function, found.codes) == ([], "Python", [""])


def test_a_second_sampler_is_refused(mine):
    with ThreadSampler() as sampler, pytest.raises(UserError, match="sampled already"), ThreadSampler():
        pass
    assert sampler._timers == []
    with ThreadSampler():
        pass


USES = """
import os, signal, sys, time
import numpy as np
from cpuopt import kernels
from cpuopt.kernels import registry
from cpuopt.kernels.compile.sampling import ThreadSampler
kernel = registry.find("gelu_forward", "vanilla")
kernel.compile()
out, inp = np.zeros(1 << 16, np.float32), np.ones(1 << 16, np.float32)
seen = 0
for i in range(int(sys.argv[1])):
    try:
        with ThreadSampler(200_000) as sampler:
            for j in range(10):
                kernel.function(out, inp)
            if i % 3 == 0:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
            if i % 3 == 1 and not (child := os.fork()):
                os._exit(0 if len(sampler.take()) >= 0 else 1)
            seen += len(sampler.take())
    except KeyboardInterrupt:
        pass
    if i % 3 == 1:
        assert os.waitpid(child, 0)[1] == 0
with ThreadSampler() as sampler:
    end = time.process_time() + 0.3
    while time.process_time() < end:
        kernel.function(out, inp)
    assert len(sampler.take()) > 5
    sys.exit(0)
"""


def test_uses_with_interrupts_forks_and_exits_end_well():
    done = subprocess.run([sys.executable, "-c", USES, "50"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_lines_are_those_of_code_from_the_cache_too(mine):
    """What a process compiled and what it loads have the same lines; the second time, the table is from the cache."""
    run = (
        "import sys; sys.path.insert(0, sys.argv[2]); import test_lines as t;"
        "from cpuopt import kernels; from cpuopt.kernels.compile import cache;"
        "kernels.load_all([sys.argv[1]]); found = t.sample('split', 0.2);"
        "print(cache.stats()['misses'], sum(t.shares(found, 'heavy', 'light')[0]) > 10)"
    )
    where = {**os.environ, "CPUOPT_CACHE_DIR": str(mine.parent / "cache"), "NUMBA_NUM_THREADS": "2"}
    where["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", run, str(mine), str(Path(__file__).parent)]
    told = [subprocess.run(command, capture_output=True, text=True, env=where, timeout=300) for _ in range(2)]
    assert [done.stderr for done in told] == ["", ""]
    (first, *yes), (second, *also) = [done.stdout.split() for done in told]
    assert int(first) > int(second) == 0
    assert yes == also == ["True"]


def test_an_interval():
    low, high = lines.interval(5, 10)
    assert (round(low, 1), round(high, 1)) == (23.7, 76.3)  # as in Newcombe 1998
    assert lines.interval(0, 10)[0] == pytest.approx(0, abs=1e-12)


def test_another_machine_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(UserError, match="x86-64 only; this is Linux with aarch64"), ThreadSampler():
        pass


ASM = """
	.text
	.file	1 "/home/me" "mine.py"
	.file	2 "<string>"
	.type	f,@function
f:                                      # @f
	.loc	2 40 1                          # <string>:40:1
	.loc	1 30 5 is_stmt 1                # mine.py:30:5 @[ <string>:41:1 ]
	vmovss	(%rax), %xmm0
.LBB0_1:                                # in a loop
	.loc	1 0 5
	addq	$8, %rcx
	.size	f, .-f
	.section	".text.g","axG",@progbits,g,comdat
	.type	g,@function
g:
	.loc	1 12 1
	retq
	.size	g, .-g
"""


def test_a_text_has_the_chain_of_each_label():
    mine = "/home/me/mine.py"
    text, chains = line_table.labelled(ASM)
    assert chains == [(("<string>", 40),), ((mine, 30), ("<string>", 41)), ((mine, 0),), ((mine, 12),)]
    machine = llvm.Target.from_triple("x86_64-pc-linux-gnu").create_target_machine(cpu="haswell")
    found = line_table.table(line_table.assembled(text, machine), chains, ("mine.py", 40, 41))
    assert found["chains"] == [(("mine.py", 40),), ((mine, 30), ("mine.py", 41)), ((mine, 12),)]
    assert [*found["functions"].values()] == [[(0, 0), (0, 1)], [(0, 2)]]  # the last one at an offset counts


def test_a_function_whose_copy_has_other_code_has_no_lines(mine):
    kernel = registry.find("residual_forward", "late")
    kernel.compile()
    part = places.KernelCode([kernel]).parts[0]
    table = places.LineTable({"functions": {part.digest: [[4, 0]]}, "chains": [[["mine.py", 3]]]})
    assert [table.find(part, part.start + n) for n in (3, 4, 9)] == [(), (("mine.py", 3),), (("mine.py", 3),)]
    assert table.find(replace(part, digest="other"), part.start + 9) == ()


def test_the_verb(here, measured, capsys, monkeypatch):
    real = ThreadSampler.take
    monkeypatch.setattr(ThreadSampler, "take", lambda self: [real(self), setattr(self, "lost", 7)][0])
    command = ["profile", "--model", "gpt2-tiny", "-B", "8", "-T", "64", "--variant", "vanilla", "--lines"]
    out = printed(capsys, *command, "matmul_forward", "--steps", "200", "--html", "page.html", "--threads", "2")
    assert all(x in out for x in ("function, with what is inlined into it", "not recompiled"))
    assert "7 samples of lines were lost" in " ".join(out.split())
    page = Path("page.html").read_text()
    assert violations(page) == []
    rows = [row for row in read(page).one(id="lines").all("div", class_="row") if row.one(class_="heat").text]
    texts = [row.one(class_="text").text for row in rows]
    assert any("range(C)" in text or "weight[o, i]" in text for text in texts), texts
    assert len([*read(page).one(id="lines").all("svg")]) == lines.SLOWEST
    assert cli.main([*command, "nothing"]) == 2
    assert "the step has no such op" in error(capsys)
    (record,) = Path("runs").glob("*/record.json")
    content = json.loads(record.read_text())
    (slow,) = [op["slowest"] for op in content["profile"]["lines"]]
    assert [c["us"] for c in slow] == sorted((c["us"] for c in slow), reverse=True)
    for row in content["profile"]["layers"]:
        row |= {"variant": "mine", "ms": row["ms"] / 2}
    before = ran(capsys, "kernels", "--headroom")["headroom"]
    (newest := Path("runs/99999999-235959-profile")).mkdir()
    (newest / "record.json").write_text(json.dumps(content))
    ranked, above = ran(capsys, "kernels", "matmul", "--headroom")["headroom"], [r["above_ms"] for r in before]
    assert ({r["gain"] for r in before}, above) == ({None}, sorted(above, reverse=True))
    assert {r["op"] for r in ranked} < {r["op"] for r in before}
    assert [r["gain"] for r in ranked] == pytest.approx([2.0] * len(ranked))
    op = before[0]["op"]
    then = f"Next: cpuopt new-kernel {op}; cpuopt lab {op}.py --model gpt2-tiny -B 8 -T 64"
    assert then in " ".join(printed(capsys, "kernels", "--headroom").split())


def test_headroom_without_a_profile_says_what_to_run(here, capsys):
    assert "run: cpuopt profile" in refused(capsys, "kernels", "--headroom")

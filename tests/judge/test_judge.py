"""The judge: candidates run in a sandbox, and hostile ones that the rules allow are found wrong."""

import json
import os
import re
import sys
import time
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
from candidates import BROKEN, FOUND, HONEST_RELU, OUTLASTS, RIGHT, RUN, TWINS, package, relu, scratched
from verbs import fails, process, spy

from cpuopt import ops
from cpuopt.check import check
from cpuopt.check.judge import Wanted
from cpuopt.check.result import Result
from cpuopt.errors import REFUSED, RefusedError, UserError
from cpuopt.isolate.process import Worker
from cpuopt.judge import naive, remote, rules, seccomp
from cpuopt.judge import session as module

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the judge closes a process as Linux does")
HOSTILE = [(of, name) for of, texts in RUN.items() for name in texts]


@pytest.fixture(scope="module")
def session():
    with module.Judge(2) as s:
        yield s


@pytest.mark.drawn(7)
@pytest.mark.parametrize(("of", "name"), HOSTILE, ids=[name for _, name in HOSTILE])
def test_a_hostile_candidate_is_found_wrong(of, name, session):
    found = session.check(RUN[of][name], "relu_forward")
    verdicts, words = FOUND.get(name, ("wrong, cheating", ""))
    assert found.verdict in verdicts.split(", "), found
    assert found.reason
    assert words in found.reason
    assert "\n" not in found.reason


def test_a_maximum_of_the_first_elements_is_found_wrong(session):
    """It holds for numbers that are all alike: behind the sample, a row must have one that stands out."""
    honest = naive.text_of(ops.softmax_forward)
    sampled = honest.replace("range(V)", "range(min(V, 64))", 1)
    assert session.check(honest, "softmax_forward").verdict == "right"
    assert session.check(sampled, "softmax_forward").verdict == "wrong"


FEW = ("deferred", "lower precision", "residency", "sizes", "limits", "order", "state", "way out")
HONEST = {**{of: TWINS[of] for of in FEW}, **RIGHT}


@pytest.mark.drawn(8)
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_candidate_is_right(name, session):
    found = session.check(HONEST[name], "relu_forward")
    assert (found.verdict, found.reason) == ("right", "")
    assert found.code
    assert found.cases > 30
    assert (found.controls, found.isolation["missing"]) == ({"nothing": "refused", "vanilla": "right"}, [])


def test_a_candidate_that_is_farther_off_than_rounding_explains_is_said(session, monkeypatch):
    rough = relu(each="max(inp[i], ZERO) * np.float32(1.00001)")
    assert session.check(rough, "relu_forward").verdict == "wrong"
    monkeypatch.setattr("cpuopt.check.judge.unsuspicious", lambda op, result: np.inf)
    found = session.check(rough, "relu_forward")
    assert found.verdict == "right"
    assert re.fullmatch(r"marginal: \d\.\d times as far off as rounding explains", found.reason)


def test_a_narrow_kernel_may_cast_what_it_reads(session):
    text = naive.text_of(ops.matmul_forward).replace('"mine"', '"mine", narrow=True')
    cast = text.replace("inp[bt, i] * weight[o, i]", "np.float32(inp[bt, i]) * np.float32(weight[o, i])")
    assert cast != text
    assert session.check(cast, "matmul_forward").verdict == "right"


def test_a_kernel_of_the_package_is_right_as_text(session):
    assert session.check(package()["softmax_forward", "optimized"], "softmax_forward").verdict == "right"


@pytest.mark.slow
def test_every_kernel_of_the_package_that_stands_alone_is_right(session, monkeypatch):
    """Of an op with two texts the optimized one, without the session's controls; one that does nothing is refused."""
    monkeypatch.setattr(session, "controlled", {op: {} for op in ops.ALL})
    texts = {op: text for variant in ("vanilla", "optimized") for (op, v), text in package().items() if v == variant}
    found = [session.check(text, op) for op, text in texts.items()]
    assert [(r.op, r.verdict, r.reason) for r in found if r.verdict != "right"] == []
    idle = [session.check(module.nothing(ops.ALL[op]), op) for op in texts]
    assert [(r.op, r.verdict) for r in idle if r.verdict != "wrong"] == []


def test_a_public_case_has_a_witness(session):
    found = session.check(relu(each="inp[i]"), "relu_forward")
    assert found.witness["argument"] == "out"
    assert found.witness["got"] < 0 == found.witness["want"]
    assert f"expected {found.witness['want']:g}" in found.reason


def test_of_a_private_case_only_its_class_is_told(session):
    found = session.check(relu(each="max(inp[i], ZERO) if inp[i] != np.float32(2) else ZERO"), "relu_forward")
    assert (found.verdict, found.witness) == ("wrong", {})
    assert found.reason == "it is wrong in a private case (values: constant)"


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_compile_is_said(name, session):
    found = session.check(BROKEN[name], "relu_forward")
    assert found.verdict == "compile error"
    assert "the candidate" in found.reason
    at = "out[i]" if "(line" in found.reason else "@kernel(ops.relu_forward,"
    assert BROKEN[name].splitlines()[found.line - 1].split()[0] == at


@pytest.mark.parametrize("name", OUTLASTS)
def test_no_constant_outlasts_a_call(name, session):
    found = session.check(OUTLASTS[name], "relu_forward")
    assert (found.verdict, found.cases) == ("compile error", 0)
    assert "holds an array, which outlasts a call" in found.reason


@pytest.mark.parametrize(("text", "said"), [
    (scratched("size", top="def size(s):\n    return len(open('x').read())"), "name 'open' is not defined"),
    (relu("import os"), "a candidate may not import os"),
    (relu("X = getattr(np, 'load')"), "name 'getattr' is not defined"),
])  # fmt: skip
def test_behind_the_rules_pythons_names_are_not_there(text, said, session, monkeypatch):
    monkeypatch.setattr(rules, "read", lambda text: (("relu_forward", "mine"),))
    found = session.check(text, "relu_forward")
    assert found.verdict in REFUSED
    assert said in found.reason


def test_a_crash_ends_one_candidate_and_no_session(session):
    before = session.remote._worker
    assert session.check(RUN["outside"]["writes far away"], "relu_forward").verdict == "wrong"
    assert session.check(HONEST_RELU, "relu_forward").verdict == "right"
    assert session.remote._worker is before


LIMITED = {"call": relu(before="n = 0\nwhile inp.shape[0] > n:\n    n += 0")}
LIMITED["open"] = relu("def made():\n    n = 1\n    while n > 0:\n        n += 1\n    return n\n\n\nN = made()")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("during", LIMITED)
def test_a_candidate_that_does_not_end_is_ended(during, session, monkeypatch):
    """In the seconds that are said: no other request follows."""
    asked = []
    spy(monkeypatch, Worker, "ask", lambda self, do, **more: asked.append(do))
    monkeypatch.setattr(session.remote, "limit_s", 3.0)
    found = session.check(LIMITED[during], "relu_forward")
    assert found.verdict == "unchecked"
    assert found.reason.startswith(f"no answer to '{during}' within 3 s")
    assert asked[-1] == during
    assert session.check(HONEST_RELU, "relu_forward").verdict == "right"


def test_a_verdict_has_a_limit(session, monkeypatch):
    usual = session.checked
    monkeypatch.setattr(module, "VERDICT_S", 1.0)
    monkeypatch.setattr(session, "checked", lambda kernel: time.sleep(1.1) or usual(kernel))
    fails(r"judge relu_forward: no verdict within 1 s; take a smaller", session.check, HONEST_RELU, "relu_forward")
    assert session.check("import os\n", "relu_forward").verdict == "refused by rule"
    monkeypatch.undo()
    assert session.check(HONEST_RELU, "relu_forward").verdict == "right"


@pytest.mark.parametrize("which", [0, -1], ids=["the process", "its copy"])
def test_a_process_that_was_killed_between_requests_is_replaced(which, session):
    session.remote.start()
    here = psutil.Process(session.remote._worker.pid)
    [here, *here.children()][which].kill()
    assert session.check(HONEST_RELU, "relu_forward").verdict == "right"


STARTED = """import json, sys
for line in sys.stdin:
    do = json.loads(line)["do"]
    if do == "open":
        {then}
    print(json.dumps({{"missing": []}}), flush=True)
"""


def opening(answer, then="continue"):
    """Return a program in the sandbox's place that answers so to a text, and goes on or ends."""
    return STARTED.format(then=f"print('{answer}', flush=True); {then}")


@pytest.mark.parametrize(("code", "of", "said"), [
    ("raise SystemExit(7)", UserError, "the sandbox does not start: ended with status 7 during 'ready'"),
    (opening("", "break"), UserError, "the sandbox loads no text: answered ''"),
    (opening('{"ended": "SIGKILL"}'), UserError, "loads no text: the candidate: its process ended by SIGKILL"),
    (opening('{"error": "no fork"}'), UserError, "the sandbox loads no text: no fork"),
    (opening('{"progress": ""}', "break"), RefusedError, "ended with status 0 during 'open'"),
])  # fmt: skip
def test_what_ends_before_it_loads_a_text_is_not_the_texts_fault(code, of, said):
    with remote.Remote(1) as one:
        one.side = replace(one.side, command=(sys.executable, "-c", code))
        with pytest.raises(of, match=said) as e:
            one.open(HONEST_RELU, ops.relu_forward, "vanilla")
        assert type(e.value) is of


def test_kernels_of_the_package_have_time_to_compile(session, monkeypatch):
    """Those of the controls, and the baseline; a candidate has its limit."""
    patient = []

    def watch(self, do, **more):
        if do == "compile":
            patient.append((more["side"], self.limit_s > 10 * remote.LIMIT_S))

    monkeypatch.setattr(session, "controlled", {})
    spy(monkeypatch, Worker, "ask", watch)
    assert session.time(HONEST_RELU, "relu_forward", module.ModelSizes("gpt2-tiny", 1, 8)).verdict not in REFUSED
    assert (patient[:2], {*patient[2:]}) == ([("A", True), ("B", True)], {("A", True), ("B", False)})


def run_in(code, **environment):
    """Run some lines in a process, and return what it printed."""
    made = process(code=code, **environment)
    return made.stdout + made.stderr


TRY = """
import contextlib, io, json
found = []
for attempt in json.loads({attempts!r}):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            exec(attempt, {{}})
        except Exception as e:
            print(e)
    found.append(said.getvalue())
print(json.dumps(found))
"""


def answered(attempts, prepare, tmp_path, **environment):
    """Require that a process closed as a candidate's is gives these answers."""
    lines = [a.format(folder=str(tmp_path), pid=os.getpid()) for a in attempts]
    made = run_in(f"from cpuopt.judge import child\n{prepare}\n{TRY.format(attempts=json.dumps(lines))}", **environment)
    found = zip(attempts.items(), json.loads(made.splitlines()[-1]), strict=True)
    assert [(attempt, said) for (attempt, words), said in found if words not in said] == [], made


ATTEMPTS = {
    "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)": "Network is unreachable",
    "open({folder!r} + '/x', 'w')": "Read-only file system", "open('/dev/shm/x', 'w')": "Read-only file system",
    "import os\nprint(sorted(n for n in os.listdir('/proc') if n.isdigit()))": "['1']",
    "import os\nos.kill({pid}, 9)": "No such process", "import os\nos.chroot('/')": "Operation not permitted",
    "import ctypes\nprint(ctypes.CDLL(None).mount(b'none', b'/', None, 0x1020, None))": "-1",
}  # fmt: skip
"""What no candidate can write, tried by Python itself, and what the system answers."""


def test_the_process_has_no_network_no_files_and_no_others(tmp_path):
    answered(ATTEMPTS, "child.close()", tmp_path)


DENIED = ["socket\nsocket.socket()", "os\nos.mkdir({folder!r} + '/x')", "os\nos.kill({pid}, 0)", "os\nos.fork()"]
DENIED += ["os\nos.execv('/bin/true', ['true'])", "os\nos.sched_setaffinity(0, [0])"]
FILTERED = dict.fromkeys((f"import {line}" for line in DENIED), "Operation not permitted") | {
    "open({folder!r} + '/x', 'w')": "Read-only file system",
    "import ctypes\nprint(ctypes.CDLL(None).ptrace(0, 0, 0, 0))": "-1",
    "import threading\nt = threading.Thread(target=print, args=['a thread'])\nt.start()\nt.join()": "a thread",
    "import os\nos.kill(os.getpid(), 0)\nprint('itself')": "itself",
    "print(len(open('/proc/self/status').read()) > 99)": "True",
}
"""What a candidate's process asks for without any namespace, and what the filter answers."""


def test_a_filter_closes_the_process_where_no_namespace_does(tmp_path):
    prepare = "from cpuopt.judge import seccomp\nchild.NEW_PLACES = -1\nchild.close()\nassert seccomp.install()"
    answered(FILTERED, prepare, tmp_path, CPUOPT_CLOSED="")


def test_a_call_sees_its_own_arrays_alone():
    code = """
import mmap, os
from cpuopt.judge.candidate import AROUND, Window, span_of
size = 64 << 20
file = os.memfd_create("x")
os.ftruncate(file, size)
windows = [Window(file, size) for _ in range(2)]
assert windows[0].start != windows[1].start
judge, (one, other) = mmap.mmap(file, size), windows
span = span_of([3, {"at": 32 << 20, "shape": (2, 5), "type": "bfloat16"}, {"at": 0, "shape": (0,), "type": "float32"}])
assert span == (32 << 20, (32 << 20) + 20), span
for at, seen in ((32 << 20, 1), ((32 << 20) + AROUND, 1), ((32 << 20) - AROUND, 1), (31 << 20, 0), (33 << 20, 0)):
    one.show(*span)
    if not os.fork():
        one.memory[at] = 120
        os._exit(7)
    assert (os.waitpid(-1, 0)[1] >> 8 == 7) == bool(seen), at
    assert (judge[at] == 120) == bool(seen)
one.show(0, 0)
if not os.fork():
    one.memory[32 << 20]
    os._exit(7)
assert os.waitpid(-1, 0)[1] == 11
print("done")
"""
    assert run_in(code) == "done\n"


def test_arrays_that_do_not_fit_are_the_kernels_fault(monkeypatch):
    with remote.Remote(1) as one:
        room = one.shared.room
        first = room(1 << 10)
        with pytest.raises(RefusedError, match=r"needs 32,768 MB for the arrays of its calls and their scratch; "):
            room(1 << 33)
        monkeypatch.setattr("cpuopt.lab.remote.available_bytes", lambda: 1 << 20)
        with pytest.raises(RefusedError, match="expected up to 1 MB"):
            room(1 << 28)
        assert len(room(1 << 10)) == len(first)


SIZED = "lambda sizes: (1 << 30) * (sizes['N'] == {})"


def test_scratch_is_usual_at_the_size_that_is_timed(session):
    task = module.ModelSizes("gpt2-tiny", 1, 8)
    (shape,) = module.shapes_of(ops.relu_forward, task)
    found = session.time(scratched(SIZED.format(shape.sizes["N"])), "relu_forward", task)
    assert found.verdict == "compile error"
    assert "asks for 1,073,741,824 elements of scratch 'x'; expected up to 4,980,736" in found.reason


def test_the_filter_knows_other_machines():
    """Of another machine, the numbers of the same calls; those that it does not have are left out."""
    mine, other = (seccomp.program(machine, 7) for machine in seccomp.ARCHITECTURES)
    assert len(other) < len(mine)
    assert len(mine) % 8 == 0


def test_what_does_not_close_the_process_is_said():
    deny = "from cpuopt.judge import child\nchild.close()\nchild.NEW_PLACES = -1\nprint(child.close())"
    assert "no network" in run_in(deny, CPUOPT_CLOSED="")


def test_bwrap_closes_the_process_where_it_is(tmp_path, monkeypatch):
    """A stand-in that notes its flags, and runs the rest."""
    fake, count = tmp_path / "bwrap", len(remote.BWRAP) - 1
    fake.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/flags\nshift {count}\nexec "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    remote.bwrap.cache_clear()
    try:
        with module.Judge(1) as s:
            assert s.remote.by == "bwrap"
            assert s.check(relu(each="inp[i]"), "relu_forward").isolation == {"by": "bwrap", "missing": []}
    finally:
        remote.bwrap.cache_clear()
    assert "--unshare-all --die-with-parent --cap-drop ALL" in (tmp_path / "flags").read_text()


def test_the_wanted_values_never_enter_the_process(session, monkeypatch):
    """If the reference gave numbers that nothing else is near to, none of them would be found in any call's arrays."""
    mark, calls = 1e30, 0  # beyond the numbers that outputs hold before a call
    usual, expected = remote.Far.__call__, check.expected

    def marked(*args):
        found = expected(*args)
        return replace(found, values={n: np.full_like(x, mark) for n, x in found.values.items()})

    def watched(self, *args):
        nonlocal calls
        calls += 1
        for x in args:
            assert not (np.abs(np.asarray(x, float) - mark) < mark / 10).any()
        usual(self, *args)

    session.controls(ops.relu_forward)
    monkeypatch.setattr(check, "expected", marked)
    monkeypatch.setattr(Wanted, "judge", lambda self, kernel, got, then="": Result(kernel.name, self.case, 0.0))
    monkeypatch.setattr(remote.Far, "__call__", watched)
    found = session.check(HONEST_RELU, "relu_forward")
    assert (found.verdict, found.reason) == ("right", "")
    assert calls > 100


def test_an_unfit_judge_is_said(session, monkeypatch):
    monkeypatch.setattr(session, "controlled", {})
    monkeypatch.setattr(module, "nothing", lambda op: HONEST_RELU)
    with pytest.raises(UserError, match="not fit to judge relu_forward: a kernel that does nothing is right"):
        session.check(HONEST_RELU, "relu_forward")
    monkeypatch.undo()

    for name, why, said in (
        ("compile", "no answer within 60 s", r"vanilla. is wrong \(no answer within 60 s\); expected"),
        ("open", "its process ended", "not fit to judge relu_forward: its process ended"),
    ):
        monkeypatch.setattr(session, "controlled", {})
        monkeypatch.setattr(remote.Remote, name, Mock(side_effect=RefusedError(why)))
        fails(said, session.check, HONEST_RELU, "relu_forward")
        monkeypatch.undo()

"""`cpuopt ab`: verdicts on made-up noise, on a clock that kernels move, and the verb itself."""

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from bad import HEAD, text
from test_timed import Clock, gelu
from verbs import error, fails, ran

from cpuopt import cli, ops
from cpuopt.check.cases import Case, calls_alike
from cpuopt.cli import ab as verb
from cpuopt.cli.common import Parser
from cpuopt.files.reading import to_json
from cpuopt.kernels import registry
from cpuopt.kernels.compile import cache
from cpuopt.lab import ab, rounds
from cpuopt.measure import comparison
from cpuopt.measure.roofline import Level, Roofs
from cpuopt.report import ab as report
from cpuopt.report import rendered
from cpuopt.train.job import Settings


class Noisy:
    """Trials that take about 1, B's by a factor more; drift, spikes and scatter as asked."""

    def __init__(self, seed, factor=1.0, scatter=0.01, spikes=0.0, drift=0.0, first=1.0):
        self.rng, self.factor, self.scatter = np.random.default_rng(seed), factor, scatter
        self.spikes, self.drift, self.first, self.n = spikes, drift, first, 0

    def __call__(self, side):
        self.n += 1
        t = (self.factor if side == "B" else 1.0) * np.exp(self.scatter * self.rng.standard_normal())
        t *= 1 + self.drift * self.n + (self.rng.random() < self.spikes) * self.rng.random()
        return t


def noisy(seed, **kw):
    trial = Noisy(seed, **kw)
    return comparison.compare(lambda: trial("A"), lambda: trial("B"), seed=seed)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("noise", "word", "least"), [
    ({"scatter": 0.01}, "no difference shown", 40), ({"scatter": 0.02, "spikes": 0.1}, "no difference shown", 40),
    ({"drift": 0.002}, "no difference shown", 40),
    *(({"factor": f, "scatter": 0.015, "spikes": 0.1}, "slower" if f > 1 else "faster", 47) for f in (1.03, 0.97, 2)),
])  # fmt: skip
def test_the_verdict_on_noise(noise, word, least):
    found = [noisy(seed, **noise).verdict().word for seed in range(50)]
    assert found.count(word) >= least
    assert word != "no difference shown" or sum(w in ("faster", "slower") for w in found) <= 1


def test_too_much_noise_is_said_and_an_interim_analysis_ends_the_comparison():
    loud, found = noisy(0, scatter=0.5), noisy(0, factor=2.0)
    assert (loud.verdict().word, loud.rounds) == ("inconclusive", 96)
    assert "wide" in loud.verdict().why
    assert [len(found.times[letter]) for letter in "ABC"] == [12, 12, 12]


def test_the_rules_of_a_verdict():
    """On the ratios, and those of the control; of 8 rounds the ends are the interval."""
    r, c = 1 + 0.002 * np.random.default_rng(0).standard_normal((2, 48))
    steady, half, noisy = np.ones(8), np.full(8, 0.5), "the machine is too noisy"
    for ratios, control, word, why in (
        (r * 1.03, c, "slower", ""),
        (r * 1.03, c * 1.02, "inconclusive",
         "the control, A against itself, differs by 2.0 %; the difference is 3.0 %"),
        (r, c * 1.02, "inconclusive", "the control"),
        (r * 1.003, c, "no difference shown", ""),  # below what an address may do
        (half, steady, "faster", ""),
        (half, np.array([0.3, 3.0, 1.0, 1.0] * 2), "inconclusive", f"interval reaches from 0.300 to 3.000: {noisy}"),
        ((0.0, 0.8), steady, "inconclusive", noisy),  # as of the same machine code beside ten busy processes
        ((0.3, 0.9), steady, "inconclusive", noisy), ((0.75, 0.9), steady, "faster", ""),
        ((0.02, 0.06), steady, "faster", ""), ((1.1, 3.0), steady, "inconclusive", noisy),
        ((20.0, 60.0), steady, "slower", ""),
    ):  # fmt: skip
        if isinstance(ratios, tuple):
            ratios = np.array([*ratios * 3, *[sum(ratios) / 2] * 2])
        found = comparison.judge([ratios], [control])
        assert (found.word, why in found.why) == (word, True), (ratios, found)
        assert len(ratios) > 8 or (found.ratio["low"], found.ratio["high"]) == (ratios.min(), ratios.max())


def test_cases_are_weighed_by_their_time():
    rng = np.random.default_rng(0)
    slow, fast, one = (f * (1 + 0.001 * rng.standard_normal(48)) for f in (1.2, 0.9, 1.0))
    assert comparison.judge([slow, fast], [one, one], [1, 9]).ratio["median"] == pytest.approx(0.93, rel=1e-3)
    assert comparison.judge([slow, fast], [one, one], [9, 1]).word == "slower"


def test_order_is_random_in_blocks_that_are_palindromes():
    for letters, orders in ("AB", 2), ("ABC", 6):
        rounds = list(islice(comparison.schedule(letters, np.random.default_rng(0)), 400))
        assert all(sorted(r) == list(letters) for r in rounds)
        assert (rounds[1::2], len(set(rounds))) == ([r[::-1] for r in rounds[::2]], orders)


def test_without_a_control_each_round_is_a_pair(clock):
    calls = []

    def side(letter, ns):
        def function():
            clock.now += ns
            calls.append(letter)

        return comparison.timer(function, clock)

    found = comparison.compare(side("A", 100), side("B", 103), analyses=[7], control=False)
    assert "".join(calls[2:]) == found.order  # without the warm-up
    assert (found.rounds, len(found.order), found.controls()) == (7, 14, None)
    assert {found.order[i : i + 4] for i in range(0, 12, 4)} <= {"ABBA", "BAAB"}
    assert found.ratios() == pytest.approx([1.03] * 7)
    assert str(found.verdict()) == "1.030 [1.030, 1.030] (98.4 % interval): slower"
    assert comparison.compare(side("A", 100), side("B", 100), analyses=[2], control=False).verdict().control is None


def test_few_rounds_say_what_their_interval_is_worth():
    """The ends of n rounds miss the median once in 2^(n-1)."""
    rng = np.random.default_rng(0)
    for n, level in ((2, 50.0), (6, 96.8), (8, 99.2), (9, 99.5), (24, 99.5)):
        r = 1.1 + 0.01 * rng.standard_normal(n)
        found = comparison.judge([r], [np.ones(n)])
        assert (found.word, found.level) == ("slower", level)
        if n < 9:
            assert (found.ratio["low"], found.ratio["high"]) == pytest.approx((r.min(), r.max()))
    drawn = rng.standard_normal((4000, 6))
    assert 0.8 * 0.032 < np.mean((drawn.min(axis=1) > 0) | (drawn.max(axis=1) < 0)) < 1.2 * 0.032


def shown(**more):
    ratio = {"median": 0.5, "low": 0.4, "high": 0.6}
    result = {"B": 1, "T": 1, "threads": 1, "a_ms": 0.00431, "b_ms": 0.00548, "ratio": ratio, "control": ratio}
    result |= {"why": "", "verdict": "faster", "doubts": [], "checks": [], "level": 99.5} | more
    asked = {"op": "gelu_forward", "a": "one", "b": "mine", "model": "m", "layer": "*"}
    asked |= {"in_step": False, "flush": False, **comparison.summed([result]), "results": [result]}
    return " ".join(rendered.as_text(report.tables(asked, None)).split())


def test_what_stands_beside_the_verdict():
    """How many calls a time sums, what is marginal, what few rounds are worth, and notes."""
    case = {**dict.fromkeys(("a_ns", "b_ns"), 1e3), "layers": ["h.0.ln_1"] * 5, "sizes": {"B": 1}}
    check = {"kernel": "gelu_forward[mine]", "case": "N=9", "status": "marginal", "reason": "", "ratio": 8.4}
    said = "marginal: gelu_forward[mine] is 8.4 times what rounding explains from the reference (N=9)"
    for more, words in (
        ({"cases": [case]}, "1x1, 1 thread, 5 calls 0.00431 0.00548"),
        ({"checks": [check, {**check, "ratio": 2.0}]}, said),
        ({"level": 96.8}, "warning: the rounds are too few for an interval of 99.5 %; take 9 or more"),
        ({"notes": ["the swap keeps two calls apart"]}, "note: the swap keeps two calls apart"),
    ):
        assert words in shown(**more)
        assert words not in shown()


BF16 = {"inp": "bfloat16", "weight": "bfloat16"}


def timed(op, a_ns, b_ns, types=(), **sizes):
    case = Case(sizes, types=dict(types), adds={}, layers=("x",))
    return {**to_json(case), "a_ns": a_ns, "b_ns": b_ns, **ab.cost(op, case)}


def test_a_time_below_the_roof_names_the_roof():
    roofs = Roofs(1, (Level("memory", None),), 100.0, {"memory": {"read": 10.0}}, 1.0)
    case = timed(ops.gelu_forward, 900.0, 400.0, N=1000)
    said = ["mine is at 200 % of the memory roof, which is impossible (N=1000)"]
    assert [ab.beyond_roofs(("one", "mine"), [case], r) for r in (roofs, None)] == [said, []]
    row = rounds.KernelRow("gelu_forward", "mine", "one", found={"alone": {"a_ms": 1.0, "b_ms": 1e-6, "cases": [case]}})
    said = rounds._roof(rounds.RoundPlan(Path("x"), "gpt2-tiny", 1, 8), roofs, row, None)
    assert said.startswith("unfit: mine at up to 80000 % of the memory roof, which was measured too low; when it is")
    fast = Roofs(1, (Level("memory", None),), 100.0, {"memory": {"read": 1e9}}, 1.0, bf16_gflops=200.0)
    plain, narrow = (timed(ops.matmul_forward, 15.0, 5.0, types, BT=10, C=10, OC=10) for types in ({}, BF16))
    assert len(ab.beyond_roofs(("one", "mine"), [plain], fast)) == 2  # 2,000 FLOPs: 20 ns, and 10
    (said,) = ab.beyond_roofs(("one", "mine"), [narrow], fast)
    assert said.startswith("mine is at 200 % of the bf16 roof, which is impossible")


def test_a_time_that_no_machine_allows_is_refused(monkeypatch):
    roofs = Roofs(2, (Level("memory", None),), 100.0, {"memory": {"read": 200.0}}, 1.0)  # 1 ms, and a quarter of it
    large, small = (ops.residual_forward, {}, {"N": 1 << 24}), (ops.matmul_forward, BF16, {"BT": 10, "C": 10, "OC": 10})
    for (op, types, sizes), known, threads, possible, ns, said in (
        (large, {}, 2, 4e6, 8e3, r"mine takes 8000 ns for \d+ FLOPs and 201326592 bytes, which is impossible: "),
        (large, {2: roofs}, 2, 3e5, 2e5, "impossible: at least 251658 ns are needed on 2 threads"),
        ((small[0], {}, small[2]), {}, 1, 6.0, 3.0, "at least 5 ns are needed"),
        (small, {}, 1, 3.0, 2.0, "at least 2 ns are needed"),
    ):
        monkeypatch.setattr(ab.machine, "stored", lambda known=known: known)
        ab.require_possible(("one", "mine"), timed(op, 8e6, possible, types, **sizes), threads)
        fails(said, ab.require_possible, ("one", "mine"), timed(op, 8e6, ns, types, **sizes), threads)


# On kernels -----------------------------------------------------------------------------------------------------------


def kernel(variant, ns, clock, calls=None, op=ops.gelu_forward, body=gelu):
    def function(*args):
        clock.now += ns
        body(*args)
        if calls is not None:
            calls.append((variant, args))

    return registry.Kernel(op, variant, function)


SHAPE = Case({"N": 1000}, adds={}, layers=("h.0.mlp", "h.1.mlp"))


@pytest.fixture
def clock():
    return Clock()


def test_both_get_the_same_arrays_and_the_clock_decides(clock):
    calls = []
    pair = kernel("a", 10_000, clock, calls), kernel("b", 20_000, clock, calls)
    found = ab.alone(pair, [SHAPE], clock=clock, analyses=[4])
    assert (found["verdict"], found["ratio"]["median"]) == ("slower", pytest.approx(2))
    assert (found["a_ms"], found["b_ms"]) == pytest.approx((0.02, 0.04))  # in two layers
    places = {"a": set(), "b": set()}
    for variant, (out, inp) in calls:
        places[variant].add((out.ctypes.data, inp.ctypes.data))
    assert len(places["a"]) == 3  # of the first calls, and of each of a sample's two
    assert places["a"] == places["b"]
    case = found["cases"][0]
    assert (case["calls_per_sample"], case["samples_per_trial"]) == ({"A": 2, "B": 2}, {"A": 400, "B": 400})
    assert [len(case["ns"]["A"]), len(case["ns"]["C"]), len(case["order"])] == [4, 4, 12]
    assert ab.alone((pair[0], pair[0]), [SHAPE], clock=clock, analyses=[4])["verdict"] == "no difference shown"


def test_a_kernel_in_bfloat16_is_called_as_in_a_step():
    """Not by numba's dispatcher, which takes microseconds for each array of a type that NumPy does not have."""
    copy = registry.find("copy", "optimized")
    for types in {}, {"out": "bfloat16"}:
        shape = Case({"N": 64}, types=types, adds={}, layers=("x",))
        assert (ab.Alone([copy], shape, 0).functions["A"] is copy.function) is (not types)


@pytest.mark.parametrize(("ns", "flush", "a", "b"), [
    ((10_000, 10_000_000), False, (2, 400), (1, 1)), ((10_000, 30_000), False, (2, 400), (2, 400)),
    ((10, 10), True, (1, ab.COLD_SAMPLES), (1, ab.COLD_SAMPLES)),  # few single calls
])  # fmt: skip
def test_a_side_that_takes_far_longer_is_sampled_by_itself(clock, ns, flush, a, b):
    pair = ab.Alone([kernel(v, n, clock) for v, n in zip("ab", ns, strict=True)], SHAPE, 0, flush=flush, clock=clock)
    assert pair.lengths == {"A": a, "B": b}


@pytest.mark.parametrize("disturbed", range(6))
def test_both_sides_have_as_many_samples_when_filling_is_disturbed(clock, disturbed, monkeypatch):
    fills, fill = [], ab.TimedKernels.fill

    def filling(timed, side, outs, *rest):
        fill(timed, side, outs, *rest)
        if outs == "almost":
            clock.now += 10**9 if len(fills) == disturbed else 10_000
            fills.append(side)

    monkeypatch.setattr(ab.TimedKernels, "fill", filling)
    pair = ab.Alone((kernel("a", 10_000, clock), kernel("b", 10_000, clock)), SHAPE, 0, clock=clock)
    assert len(fills) > disturbed
    assert pair.lengths["A"] == pair.lengths["B"] == (2, 400)


@pytest.mark.parametrize("flush", [False, True])
def test_the_other_state_of_the_caches_stands_beside(clock, flush, monkeypatch):
    """A kernel that takes 30 us more once the flusher ran, on a clock that both move."""
    cold = []

    def body(out, inp):
        gelu(out, inp)
        clock.now += 30_000 * len(cold)
        cold.clear()

    gelu = kernel("a", 0, Clock()).function
    monkeypatch.setattr(ab, "_flusher", lambda: lambda: cold.append(1))
    pair = tuple(kernel(v, ns, clock, body=body) for v, ns in (("a", 10_000), ("b", 20_000)))
    found = ab.alone(pair, [SHAPE], clock=clock, analyses=[4], flush=flush, other=True)
    warm, flushed, n = {"a_ms": 0.01, "b_ms": 0.02}, {"a_ms": 0.04, "b_ms": 0.05}, len(SHAPE.layers)
    assert {k: found[k] / n for k in warm} == pytest.approx(flushed if flush else warm)
    beside = found["beside"]
    assert beside.pop("caches") == ("warm" if flush else "cold")
    assert {k: ms / n for k, ms in beside.items()} == pytest.approx(warm if flush else flushed)
    assert "beside" not in ab.alone(pair, [SHAPE], clock=clock, analyses=[2])


def test_shapes_of_a_model_and_their_layers():
    settings = Settings(model="gpt2-tiny", B=2, T=8)
    (shape,) = calls_alike(ab.calls_of(ops.attention_forward, settings))
    assert (shape.sizes, shape.layers) == ({"B": 2, "T": 8, "C": 64, "NH": 2}, ("h.0.attn", "h.1.attn"))
    assert len(ab.calls_of(ops.attention_forward, settings, "h.1.*")) == 1
    assert ab.calls_of(ops.residual_forward, settings)  # which rewrites leave none of
    said = r"does not call it in a layer 'h.7.attn'; did you mean 'h.\d.attn'"
    fails(said, ab.calls_of, ops.attention_forward, settings, "h.7.attn")


def test_several_sizes_are_one_verdict_where_they_agree():
    def result(word, median, n):
        ratio = {"median": median, "low": median / 1.1, "high": median * 1.1}
        return {"verdict": word, "ratio": ratio, "why": "", "B": 4, "T": 64, "threads": n}

    found = comparison.summed([result("slower", 2.0, 1), result("slower", 8.0, 2)])
    assert (found["verdict"], found["ratio"]["median"]) == ("slower", pytest.approx(4))
    found = comparison.summed([result("slower", 2.0, 1), result("faster", 0.5, 2)])
    assert (found["verdict"], found["why"]) == ("inconclusive", "it depends: 4x64 on 1: slower; 4x64 on 2: faster")
    assert [comparison.analyses_up_to(n) for n in (60, 10)] == [[12, 24, 48, 60], [10]]


# The verb -------------------------------------------------------------------------------------------------------------

FEW = "if len(inp) == 8192: out, inp = out[:64], inp[:64]\n..."
FILE = HEAD + text("gelu_forward", "...\n...\n...", "thrice") + text("gelu_forward", FEW, "where_timed")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FILE)


def test_sizes_are_those_of_b_and_t_like_those_of_every_verb():
    def sizes(*flags):
        parser = Parser()
        verb.flags(parser)
        return [label for label, *_ in verb.sizes_of(parser.parse_args(["gelu_forward", "a", "b", *flags]))]

    assert (sizes(), sizes("-B", "2"), sizes("-B", "2", "-T", "16")) == (["4x64"], ["2x64"], ["2x16"])
    assert sizes("--sizes", "2x16,4x32") == ["2x16", "4x32"]
    for flags, why in (
        (["--sizes", "2x16", "-B", "2"], "give one of the two"),
        (["-T", "0"], "-T 0: expected 1 or more"),
    ):
        fails(why, sizes, *flags)


FLAGS = ["--kernels", "mine.py", "--model", "gpt2-tiny", "--sizes", "2x16", "--threads", "1", "--rounds", "12"]


def test_alone(capsys):
    found = ran(capsys, "ab", "gelu_forward", "vanilla", "thrice", *FLAGS)
    assert found["verdict"] == "slower"
    assert 2 < found["ratio"]["low"] <= found["ratio"]["median"] <= found["ratio"]["high"]
    (result,) = found["results"]
    assert {c["status"] for c in result["checks"]} == {"right"}
    checks = [(c["kernel"], c["case"]) for c in result["checks"]]
    timed = [c for c in checks if checks.count(c) == 1]
    assert sorted(timed) == [("gelu_forward[thrice]", "N=8192"), ("gelu_forward[vanilla]", "N=8192")]
    assert len(set(checks)) * 2 == len(checks) + len(timed)  # the others before and after
    assert result["hashes"]["vanilla"] == cache.digest(registry.KERNELS["gelu_forward", "vanilla"].function)
    kept = json.loads((Path(found.pop("path")) / "record.json").read_text())
    assert (kept["kind"], {k: kept[k] for k in found}) == ("ab", found)


def test_in_the_step(capsys):
    where = ["--layer", "h.1.*", "--in-step", "--variant", "vanilla"]
    found = ran(capsys, "ab", "gelu_forward", "vanilla", "thrice", *FLAGS, *where)
    (result,) = found["results"]
    assert (result["layers"], found["verdict"]) == (["h.1.mlp"], "slower")
    assert result["ratio"]["median"] > 2
    assert result["step"]["ratio"]["median"] < result["ratio"]["median"]
    assert (result["losses"]["A"], len(result["losses"]["A"])) == (result["losses"]["B"], 3)
    assert result["losses"]["A"][0] != result["losses"]["A"][1]


@pytest.mark.parametrize(("args", "said"), [
    (["gelu_forward", "vanilla", "where_timed"], "[where_timed] is wrong, so it is not timed: out["),
    (["gelu", "vanilla", "thrice"], "ab 'gelu': no such op; the nearest of "),
    (["gelu_forward", "vanilla", "thrise"], "no variant 'thrise'; did you mean 'thrice'?"),
    (["gelu_forward", "vanilla", "thrice", "--flush", "--in-step"], "--flush with --in-step"),
    (["gelu_forward", "vanilla", "thrice", "--rounds", "3"], "--rounds 3: expected 6 or more"),
])  # fmt: skip
def test_what_is_refused(args, said, capsys):
    assert cli.main(["ab", *args[:3], *FLAGS, *args[3:]]) == (1 if "is wrong" in said else 2)
    assert said in error(capsys)
    assert not Path("runs").exists()

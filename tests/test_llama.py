"""Four odd models of the Llama family against values of Hugging Face's ``transformers``.

The values are made by ``golden/transformers_llama.py``; ``golden/compare_llama.py`` compares whole arrays with those of
the library itself.
"""

from dataclasses import replace

import numpy as np
import pytest
from golden.compare_llama import HERE, ROUTES, bits, engine_of, values_of
from golden.llama_cases import CASES, TOLERANCE, distance, summarize, unpacked

from cpuopt.models import from_json

with np.load(HERE / "llama.npz") as _found:
    KEPT = {case: {part: _found[f"{case}/{part}"] for part in ("losses", "rows", "norms")} for case in CASES}
WANT = {case: unpacked(CASES[case], kept) for case, kept in KEPT.items()}


def far(case, values):
    """The quantities that lie further from those of transformers than allowed, and how far."""
    distances = {name: distance(x, WANT[case][name]) for name, x in summarize(values).items()}
    return {name: d for name, d in distances.items() if not d <= TOLERANCE}


@pytest.mark.parametrize("route", ROUTES, ids=[r.name for r in ROUTES])
@pytest.mark.parametrize("case", CASES)
def test_it_agrees_with_transformers_and_has_the_same_bits_on_any_threads(case, route):
    engine = engine_of(CASES[case], route)
    values = values_of(CASES[case], engine)
    assert far(case, values) == {}
    whole = not route.fuse
    assert {n for n in WANT[case] if whole or n.startswith("after/") or n in ("loss", "losses")} == values.keys()
    assert len({bits(CASES[case], engine, threads) for threads in (1, 2, 3, 4)}) == 1


def test_names_are_those_of_transformers():
    for case in CASES.values():
        assert from_json(case.config()).shapes() == case.shapes()


WRONG = [
    ("nine_heads", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12}, {}),
    ("head_size_128", {"rms_norm_eps": 1e-4}, {}),
    ("head_size_128", {}, {"rope_theta": 9e5}),
    ("biases", {}, {"rope_type": "linear", "factor": 1.01}),
    ("llama3_scaling", {}, {"high_freq_factor": 3.9}),
    ("llama3_scaling", {}, {"low_freq_factor": 1.1}),
    ("llama3_scaling", {}, {"factor": 8.1}),
    ("llama3_scaling", {}, {"original_max_position_embeddings": 33}),
]


@pytest.mark.parametrize(("case", "sizes", "rope"), WRONG)
def test_a_wrong_size_is_noticed(case, sizes, rope):
    on = CASES[case]
    wrong = replace(on, sizes={**on.sizes, **sizes}, rope={**on.rope, **rope})
    assert wrong.shapes() == on.shapes()
    tokens, targets = on.tokens()
    for tried, right in ((on, True), (wrong, False)):
        engine = engine_of(tried, ROUTES[0], train=False)
        engine.forward(tokens=tokens, targets=targets)
        assert (far(case, {"logits": engine.array(engine.program.outputs[1])}) == {}) == right

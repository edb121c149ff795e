"""What a user gets who names nothing: the optimized kernels with their rewrites, and vanilla's losses."""

import os
from itertools import pairwise

import pytest

from cpuopt import cli
from cpuopt.train.job import Settings, build_only

DEFAULT = build_only(Settings(model="gpt2-tiny"))


def test_every_op_of_gpt2_has_an_optimized_kernel():
    assert {k.variant for k in DEFAULT.kernels} == {"optimized"}


def test_the_default_trains_as_vanilla_does(tmp_path, capsys):
    before = os.environ["NUMBA_NUM_THREADS"]
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(1000)))
    job = ["train", "--model", "gpt2-tiny", "--data", str(path), "-B", "2", "-T", "13", "--steps", "6", "--json"]
    job += ["--lr", "1e-3", "--runs", str(tmp_path / "runs")]
    losses = []
    for flags in ([], ["--fuse", "none"], ["--variant", "vanilla"], ["--clip", "100"]):
        assert cli.main([*job, *flags]) == 0
        folder = max((tmp_path / "runs").iterdir(), key=lambda p: p.stat().st_mtime_ns)
        losses.append([float(line.split(":")[2].split()[0]) for line in (folder / "main.log").read_text().splitlines()])
        capsys.readouterr()
    for one, other in pairwise(losses):
        assert one == pytest.approx(other, rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    assert os.environ["NUMBA_NUM_THREADS"] == before  # numba runs, and would refuse another number at its next compile

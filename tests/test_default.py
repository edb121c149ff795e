"""What a user gets who names nothing: the optimized kernels, whose losses test_library.py and test_families.py have."""

from cpuopt.train.job import Settings, build_only


def test_every_op_of_gpt2_has_an_optimized_kernel():
    assert {k.variant for k in build_only(Settings(model="gpt2-tiny")).kernels} == {"optimized"}

"""Code for other machines: what is read off it, its cycles, and the tile of each, computed here."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from machine_code import foreign
from verbs import fails, process, ran, refused

from cpuopt.kernels.toolkit import simd
from cpuopt.kernels.toolkit.micro import InstructionSet, avx2, avx512, blocking, host, neon, plain, targets
from cpuopt.kernels.toolkit.micro.targets import TARGETS
from cpuopt.lab import targets as reader

F32 = np.float32
WIDTHS = dict(zip(TARGETS, (8, 8, 16, 16, 16, 4, 4), strict=True))


FOREIGN = ("haswell", "znver4", "neoverse-v2")
"""A machine of each width."""


def hot(name: str, fewer: int = 0) -> reader.ForeignLoop:
    """The loop of a machine's micro-kernel, of its tallest tile or of fewer rows."""
    target = TARGETS[name]
    tile = host.choose(target.features)
    text = foreign.machine_code(tile, tile.rows - fewer, target.triple, target.name)
    return max(reader.loops(text, target), key=lambda v: v.fmas)


@pytest.mark.parametrize("name", TARGETS)
def test_the_tile_of_each_machine_stays_in_registers_and_fills_them(name: str) -> None:
    tile = host.choose(TARGETS[name].features)
    for fewer in (0, 1, tile.rows - 1):
        loop, rows = hot(name, fewer), tile.rows - fewer
        assert (loop.width, loop.fmas, loop.spills) == (WIDTHS[name], 2 * rows * tile.vectors, 0)
        if WIDTHS[name] > 4:
            assert loop.loads == 2 * (rows + tile.vectors)
            assert not any("call" in line for line in loop.lines)
            # else each row's address is had from the one before: a chain longer than the multiply-adds
            moves = sum(bool(re.match(r"\s*(?:add|lea)q\s", line)) for line in loop.lines)
            assert moves <= 2 * (1 + -(-tile.rows // blocking.POINTED)) + 1
        else:  # a float that is loaded into all lanes takes a pipe of the multiply-adds
            assert not any("ld1r" in line for line in loop.lines)
    loop = hot(name)
    assert loop.instructions <= 2.1 * loop.fmas
    assert loop.limit == loop.fmas / TARGETS[name].pipes
    assert hot(name, -1).spills or WIDTHS[name] == 4  # of which ARM's tile has a register left


@pytest.mark.skipif(not shutil.which(reader.MCA), reason="llvm-mca is optional")
def test_cycles_are_near_to_the_port_limit() -> None:
    loop = hot("haswell")  # whose model is the same in all versions of LLVM
    cycles = reader.cycles(loop, TARGETS["haswell"])
    assert loop.limit <= cycles <= loop.limit / 0.95
    loop.lines[:-1] *= 2
    assert 1.9 * cycles < reader.cycles(loop, TARGETS["haswell"]) < 2.1 * cycles


LOOPS = {
    "neoverse-v2": """
	.type	outer,@function
outer:
.LBB0_1:
	fmul	v0.4s, v1.4s, v2.4s
.LBB0_2:
	ldr	q0, [x1, x2]              // of x
	ldr	q3, [sp, #16]
	str	x9, [sp, #32]
	fmla	v0.4s, v1.4s, v3.s[0]
	subs	x3, x3, #1
	b.ne	.LBB0_2
	cbnz	x4, .LBB0_1
""",
    "znver4": """
	.type	outer,@function
outer:
.LBB0_1:
	vmulps	%zmm0, %zmm1, %zmm2
.LBB0_2:
	vmovups	(%rax,%rcx), %zmm0        # of x
	vmovups	16(%rsp), %zmm3
	movq	%r9, 32(%rsp)
	vfmadd231ps	%zmm1, %zmm0, %zmm3
	decq	%rdx
	jne	.LBB0_2
	jne	.LBB0_1
""",
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_read(name: str) -> None:
    (loop,) = reader.loops(LOOPS[name], TARGETS[name])
    assert (loop.function, loop.instructions, loop.width) == ("outer", 6, WIDTHS[name])
    assert (loop.fmas, loop.loads, loop.spills) == (1, 1, 1)


BACK = {"neoverse-v2": ("\tb\t.LBB0_1\n", "\ttbnz\tw0, #1, .LBB0_1\n"), "znver4": ("\tjmp\t.LBB0_1\n",)}


@pytest.mark.parametrize("name", LOOPS)
def test_each_jump_back_makes_a_loop_and_a_table_of_places_none(name: str) -> None:
    head, body = LOOPS[name].split(".LBB0_2:")
    body = "".join(line for line in body.splitlines(keepends=True) if ".LBB" not in line)
    for jump in BACK[name]:
        (loop,) = reader.loops(head + body + jump, TARGETS[name])
        assert loop.fmas == 1
    for line in ("\tadr\tx8, .LBB0_1\n", "\t.long\t.LBB0_1\n"):
        assert reader.loops(head + body + line, TARGETS[name]) == []


@pytest.mark.parametrize("name", FOREIGN)
def test_the_tile_of_each_machine_is_right_here(name: str) -> None:
    tile, depth = host.choose(TARGETS[name].features), 5
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=llvm.get_host_cpu_name(), opt=3)
    module = foreign.micro_kernel(tile, tile.rows, llvm.get_process_triple())
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine)
    floats, n, yes = ctypes.c_void_p, ctypes.c_int64, ctypes.c_bool
    kinds = [floats, n, n, floats, n, floats, n, n, yes, floats, n, n]
    product = ctypes.CFUNCTYPE(None, *kinds)(engine.get_function_address("product"))
    rng, width = np.random.default_rng(0), tile.vectors * tile.lanes
    a, b = rng.random((tile.rows, depth + 2), F32), rng.random((depth, width + 3), F32)
    for add in (False, True):
        c = rng.random((tile.rows + 1, width + 1), F32)
        want = c.copy()
        want[:-1, :-1] = add * c[:-1, :-1] + a[:, :depth].astype(float) @ b[:, :width]
        at = [x.ctypes.data for x in (a, b, c)]
        product(at[0], depth + 2, 1, at[1], width + 3, at[2], width + 1, depth, add, at[0], 0, 0)
        np.testing.assert_allclose(c, want, rtol=1e-5)  # what lies around the tile is as it was


@pytest.mark.parametrize(("features", "shape"), [
    ("sse2 avx2 fma avx512f", (14, 2, 16)), ("avx2 fma", (6, 2, 8)), ("neon", (14, 2, 4)), ("sse2", (4, 2, 4)),
    ("avx2", (4, 2, 4)),
])  # fmt: skip
def test_features_choose_the_tile(features: str, shape: tuple[int, int, int]) -> None:
    found = host.choose(features.split())
    assert (found.rows, found.vectors, found.lanes) == shape


@pytest.mark.parametrize("found", [avx512.SET, avx2.SET, neon.SET, plain.SET], ids=lambda found: found.name)
def test_a_tile_fills_the_registers_and_the_pipes(found: InstructionSet) -> None:
    used = found.rows * found.vectors + found.vectors + 1 + found.spare
    assert used <= found.registers < used + found.vectors
    assert found.rows * found.vectors >= 8


def test_the_environment_chooses_the_tile_and_numbas_settings_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, lanes in WIDTHS.items():
        monkeypatch.setenv(targets.VARIABLE, name)
        assert host.choose(host.features()).lanes == lanes
    monkeypatch.setenv(targets.VARIABLE, "znver33")
    fails("did you mean 'znver3'", host.features)
    monkeypatch.delenv(targets.VARIABLE)
    for name, features, lanes in (("x86-64-v4", "", 16), ("generic", "", 4), ("generic", "+avx2,+fma,-avx512f", 8)):
        monkeypatch.setattr(numba.config, "CPU_NAME", name)
        monkeypatch.setattr(numba.config, "CPU_FEATURES", features)
        assert host.choose(host.features()).lanes == lanes


@pytest.mark.parametrize("triple", ["aarch64-unknown-linux-gnu", "arm64-apple-darwin23.1.0"])
def test_every_arm_has_neon_whatever_llvm_can_read(monkeypatch: pytest.MonkeyPatch, triple: str) -> None:
    monkeypatch.setattr(host.llvm, "get_process_triple", lambda: triple)
    monkeypatch.setattr(host.llvm, "get_host_cpu_features", dict)
    found = host.choose(host.features())
    assert (found.lanes, found.rows, found.dot) == (4, 14, None)
    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    assert host.choose(host.features()) == found


KERNEL = """
import numpy as np
from cpuopt import kernel, ops
@kernel(ops.gelu_forward, "line")
def gelu_forward(out, inp):
    for i in range(out.shape[0]):
        out[i] = inp[i] * np.float32(0.3) + out[i]
"""


def test_the_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(KERNEL)
    monkeypatch.chdir(tmp_path)
    asked = ["inspect", "gelu_forward", "line", "--kernels", "mine.py", "--target"]
    (found,) = ran(capsys, *asked, "neoverse-v2")["kernels"]
    assert (found["target"], max(loop["width"] for loop in found["loops"])) == ("neoverse-v2", 4)
    assert "target 'cray': no such machine; known: haswell" in refused(capsys, *asked, "cray")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, lanes in WIDTHS.items() if n in FOREIGN and lanes != simd.LANES])
def test_products_with_the_tile_of_each_machine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of this machine's width is in every other test."""
    names = ("matmul_forward", "matmul_backward_input", "matmul_backward_weight")
    patient = ["--limit", "800"]  # a limit counts the compilation, for a tile that nothing has compiled for before
    asked = ["check", *names, "--variant", "optimized", "--model", "none", *patient]
    monkeypatch.chdir(tmp_path)
    made = process(*asked, limit_s=900, **{"NUMBA_NUM_THREADS": "4", targets.VARIABLE: name})
    assert made.returncode == 0, made.stdout + made.stderr

"""What the process may use: affinity, quotas and limits of control groups, of both versions, nested, in containers."""

import mmap
import os
import re
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from verbs import fails

from cpuopt import machine
from cpuopt.cli import common
from cpuopt.comm.places import Here, places
from cpuopt.kernels.toolkit import threads
from cpuopt.measure import rates as lab_machine
from cpuopt.program import arena

V1, V2 = "4:memory:/jobs/a\n3:cpu,cpuacct:/jobs/a\n1:name=systemd:/x\n", "0::/jobs/a\n"
BOTH = "4:memory:/jobs/a\n0::/x\n"


@pytest.fixture(autouse=True)
def computer(tmp_path, monkeypatch):
    """A computer of 16 cores whose control groups are these files."""

    def computer(membership, files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")
        (tmp_path / "self").write_text(membership)

    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    monkeypatch.setattr(machine, "DEVICES", tmp_path / "devices")
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "self")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    return computer


@pytest.mark.parametrize(
    ("membership", "files", "quota", "cores"),
    [
        *((V2, {}, None, 16), ("", {"cpu.max": "100000 100000"}, None, 16)),
        *((V2, {"jobs/a/cpu.max": "max 100000"}, None, 16), (V2, {"jobs/a/cpu.max": "250000 100000"}, 2.5, 2)),
        *((V2, {"jobs/a/cpu.max": "50000 100000"}, 0.5, 1), (V2, {"jobs/a/cpu.max": "9900000 100000"}, 99, 16)),
        (V2, {"jobs/a/cpu.max": "max 100000", "jobs/cpu.max": "400000 100000"}, 4, 4),  # of the group around it
        (V2, {"cpu.max": "300000 100000"}, 3, 3),  # in a container that does not see where it is
        (V2, {"jobs/a/cpu.max": "nonsense", "jobs/cpu.max": "", "cpu.max": "0 0 0"}, None, 16),
        (V1, {"cpu,cpuacct/jobs/a/cpu.cfs_quota_us": "-1", "cpu,cpuacct/jobs/a/cpu.cfs_period_us": "100000"}, None, 16),
        (V1, {"cpu,cpuacct/jobs/a/cpu.cfs_quota_us": "200000", "cpu,cpuacct/jobs/a/cpu.cfs_period_us": "100000"}, 2, 2),
        (V1, {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3, 3),
        (BOTH, {"unified/x/cpu.max": "500000 100000"}, 5, 5),
    ],
)
def test_cores_are_the_same_everywhere(computer, membership, files, quota, cores):
    computer(membership, files)
    assert machine.quota() == quota
    every = machine.cores(), common.cores(), threads.cores(), machine.describe()["cores"]
    assert (*every, lab_machine.levels()[-1].sharers) == (cores,) * 5
    assert (lab_machine.noise(0.01)["quota_cores"], common.thread_counts("")) == (quota, sorted({1, cores}))


CPU, PAIR = "devices/system/cpu/cpu", "topology/thread_siblings_list"
SMT = {f"{CPU}{n}/{PAIR}": f"{n % 8},{n % 8 + 8}" for n in range(16)}  # 8 cores of two threads
HYBRID = {f"{CPU}{n}/{PAIR}": f"{n & ~1}-{n | 1}" if n < 8 else f"{n}" for n in range(16)}  # 4 of two and 8 small ones
KINDS = HYBRID | {"devices/cpu_core/cpus": "0-7", "devices/cpu_atom/cpus": "8-15"}
ARM = {f"{CPU}{n}/cpu_capacity": f"{(1024, 870, 310)[(n > 1) + (n > 5)]}" for n in range(16)}


@pytest.mark.parametrize(
    ("files", "allowed", "cores"),
    [
        *((SMT, range(16), 8), (SMT, range(8), 8), (SMT, (0, 8, 9), 2), (SMT, (9,), 1)),
        *(({**SMT, "cpu.max": f"{n} 100000"}, range(16), cores) for n, cores in ((300000, 3), (1200000, 8))),
        *((KINDS, range(16), 4), (HYBRID, range(16), 12), (KINDS, range(6, 16), 1)),
        (KINDS, range(8, 16), 8),  # small ones only
        *((ARM, range(16), 6), (ARM, range(6, 16), 10)),
        ({f"{CPU}3/{PAIR}": "nonsense", f"{CPU}4/cpu_capacity": "", "devices/cpu_core/cpus": "x"}, range(16), 16),
    ],
)
def test_cores_are_physical_performance_cores(computer, monkeypatch, files, allowed, cores):
    computer(V2, files)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
    assert machine.cores() == cores


@pytest.mark.parametrize("of", [lambda n: n // 4 % 2, lambda n: n % 2], ids=["halves", "in turn"])
def test_ranks_have_the_cores_of_a_memory_node_and_no_core_twice(computer, monkeypatch, of):
    """Two nodes of 4 cores with two threads each, whose numbers the system gives in either way."""
    nodes = {str(i): ",".join(str(n) for n in range(16) if of(n) == i) for i in (0, 1)}
    computer(V2, SMT | {f"devices/system/node/node{i}/cpulist": cpus for i, cpus in nodes.items()})
    ranks = places([Here("a", tuple(machine.side_by_side(range(16))))] * 4)
    assert [{of(n) for n in rank.cores} for rank in ranks] == [{0}, {0}, {1}, {1}]
    for rank in ranks:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, rank=rank: set(rank.cores))
        assert machine.cores() == 2  # of two threads each, which are both this rank's


def core(implementer, part):
    """The lines of Linux on an Arm core."""
    return f"processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\nCPU implementer\t: {implementer}\n" + (
        f"CPU architecture: 8\nCPU variant\t: 0x1\nCPU part\t: {part}\nCPU revision\t: 1\n\n"
    )


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nvendor_id\t: A\nmodel\t: 1\nmodel name\t: AMD EPYC: 9\n\n" * 2, "AMD EPYC: 9"),
        (core("0x41", "0xd4f") * 4, "Neoverse V2"),
        (core("0x41", "0xd05") * 4 + core("0x41", "0xd0b") * 2, "Cortex-A55 + Cortex-A76"),
        (core("0x61", "0xd4f"), "Arm core 0x61 0xd4f"),  # a part is its implementer's
        ("processor\t: 0\nFeatures\t: fp\n", ""),
        ("", ""),
    ],
)
def test_the_name_of_the_processor(tmp_path, monkeypatch, cpuinfo, name):
    assert machine.name_in(cpuinfo) == name
    monkeypatch.setattr(machine, "PROC", tmp_path)
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    assert machine.describe()["cpu"] == "aarch64"  # no such file
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert machine.describe()["cpu"] == (name or "aarch64")


def test_caches_as_arm_lists_them(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CACHES", tmp_path)
    of_core = [("1", "Data", "64K", "0"), ("1", "Instruction", "64K", "0"), ("2", "Unified", "2048K", "0")]
    for i, values in enumerate([*of_core, ("3", "Unified", None, "0-63")]):  # in clouds, without the shared one's size
        (folder := tmp_path / f"index{i}").mkdir()
        for file, value in zip(("level", "type", "size", "shared_cpu_list"), values, strict=True):
            if value:
                (folder / file).write_text(f"{value}\n")
    assert machine.describe()["caches"] == {"L1d": "64K", "L1i": "64K", "L2": "2048K"}
    assert [level.name for level in lab_machine.levels()] == ["L1", "L2", "memory"]


NODE = "devices/system/node/node"
HUGE = {"huge/enabled": "always [madvise] never", "huge/hpage_pmd_size": 1 << 21}


@pytest.mark.parametrize(
    ("files", "nodes", "huge"),
    [
        ({}, {}, (None, None, "small")),
        ({f"{NODE}0/cpulist": "0-7", "devices/system/node/online": "0"}, {"0": "0-7"}, (None, None, "small")),
        (HUGE | {f"{NODE}{n}/cpulist": f"{n}" for n in (10, 2)}, {"2": "2", "10": "10"}, (1 << 21, "madvise", "huge")),
        ({"huge/enabled": "[always] madvise never"}, {}, (None, "always", "huge")),
        ({"huge/enabled": "always madvise [never]", "huge/hpage_pmd_size": "x"}, {}, (None, "never", "small")),
    ],
)
def test_nodes_and_pages(computer, tmp_path, monkeypatch, files, nodes, huge):
    computer(V2, files)
    monkeypatch.setattr(machine, "HUGE", tmp_path / "huge")
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    found = machine.describe()
    assert [*found["numa_nodes"].items()] == [*nodes.items()]
    names = ("huge_bytes", "huge_mode", "arena")
    assert found["pages"] == {"bytes": mmap.PAGESIZE} | dict(zip(names, huge, strict=True))
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert machine.pages()["arena"] == "small"


HELD = "anon 7\ninactive_file 1\ntotal_inactive_file 30\ntotal_active_file 4"


@pytest.mark.parametrize(
    ("membership", "files", "left"),
    [
        *((V2, {"jobs/a/max": "max", "jobs/a/current": 5}, None), (V2, {"jobs/a/max": 100, "jobs/a/current": 30}, 70)),
        (V2, {"jobs/max": 100, "jobs/current": 30, "jobs/a/max": 90, "jobs/a/current": 0}, 70),
        (V1, {"memory/jobs/a/limit_in_bytes": 100, "memory/jobs/a/usage_in_bytes": 1}, 99),
        (BOTH, {"memory/limit_in_bytes": 100, "memory/usage_in_bytes": 1}, 99),
        *((V2, {}, None), (V2, {"max": 100, "current": 130}, 0)),
        # what is held of files goes where memory is wanted
        (V2, {"jobs/a/max": 100, "jobs/a/current": 60, "jobs/a/stat": "inactive_file 30\nactive_file 4"}, 74),
        (V1, {"memory/limit_in_bytes": 100, "memory/usage_in_bytes": 60, "memory/stat": HELD}, 74),
    ],
)
def test_the_arena_knows_what_its_container_has_left(computer, membership, files, left):
    computer(membership, {re.sub(r"(\w+)$", r"memory.\1", name): x for name, x in files.items()})
    assert machine.memory_left() == left
    assert (arena.available_bytes() == left) is (left is not None)


def test_how_often_the_quota_struck(computer):
    computer(V2, {"jobs/cpu.stat": "usage_usec 5\nnr_throttled 7"})
    assert (machine.throttled(), lab_machine.noise(0.01)["throttled"]) == (7, 7)


def test_a_computer_without_control_groups(monkeypatch):
    monkeypatch.setattr(machine, "MEMBERSHIP", Path("/none"))
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert (machine.cores(), machine.quota(), machine.memory_left(), machine.throttled()) == (3, None, None, None)


def test_what_this_process_has_started_is_none_of_the_others(monkeypatch):
    machine_s, own = iter([10.0, 20.0]), iter([(1.0, 1.0, 0.0, 0.0, 0.0), (2.0, 2.0, 4.0, 3.0, 9.0)])
    clock = iter([0.0, 1.0])
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(user=next(machine_s)))
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(cpu_times=lambda: next(own)))
    monkeypatch.setattr(machine.time, "monotonic", lambda: next(clock))
    assert machine.Others().cores() == 1.0


# How threads wait -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has not chosen yet, on 16 cores on which some threads run."""

    def fresh(running, used=99.0, **environment):
        for name in (*machine.THEIRS, machine.WAITING):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "loadavg").write_text(f"9.00 5.00 1.00 {running}/345 6789\n")
        monkeypatch.setattr(machine.Others, "cores", lambda self: used)

    monkeypatch.setattr(machine, "LOAD", tmp_path / "loadavg")
    monkeypatch.setattr(machine, "_waiting", {})
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    return fresh


@pytest.mark.parametrize(
    ("threads", "running", "environment", "how", "why"),
    [
        *((16, running, {}, "follow", "16 cores have room for 16 threads") for running in (1, 9)),
        (17, 1, {}, "sleep", "17 threads on 16 cores"),
        (16, 1, {"CPUOPT_WAITING": "sleep"}, "sleep", "CPUOPT_WAITING=sleep"),
        (17, 9, {"CPUOPT_WAITING": "follow"}, "follow", "CPUOPT_WAITING=follow"),
        (17, 9, {"CPUOPT_WAITING": "spin"}, "spin", "CPUOPT_WAITING=spin"),
        (17, 9, {"OMP_WAIT_POLICY": "active", "CPUOPT_WAITING": "sleep"}, "given", "OMP_WAIT_POLICY=active"),
        (1, 1, {"GOMP_SPINCOUNT": "7"}, "given", "GOMP_SPINCOUNT=7"),
    ],
)
def test_threads_wait_as_cores_and_environment_say(fresh, threads, running, environment, how, why):
    fresh(running, **environment)
    chosen = machine.waiting(threads)
    assert chosen["how"] == how
    assert why in chosen["why"]
    assert machine.waiting(99) is chosen  # threads start once
    assert machine.describe()["waiting"] == chosen  # records say how


@pytest.mark.parametrize(("used", "count"), [(0.4, 0), (0.6, 1), (3.0, 1)])
def test_what_only_flares_up_is_no_load(fresh, used, count):
    fresh(2, used=used)
    assert machine.running() == count


def test_a_quota_counts_as_few_cores(fresh, computer):
    fresh(1)
    computer(V2, {"jobs/a/cpu.max": "200000 100000"})
    assert machine.waiting(4) == {"how": "sleep", "why": "4 threads on 2 cores"}


def test_an_unknown_way_of_waiting_is_refused(fresh):
    fresh(1, CPUOPT_WAITING="nap")
    fails("CPUOPT_WAITING=nap: expected follow, spin, sleep", machine.waiting, 1)


@pytest.mark.parametrize(("n", "variables"), [(12, {}), (17, {"OMP_WAIT_POLICY": "passive"})])
def test_threads_start_with_the_variables_of_their_way(fresh, monkeypatch, n, variables):
    fresh(1)
    seen, followed = [], []
    monkeypatch.setattr(threads, "follow", followed.append)
    monkeypatch.setattr(threads, "threading_layer", lambda: threads.NOT_STARTED)
    monkeypatch.setattr(threads.parallel, "_launch_threads", lambda: seen.append(dict(os.environ)))
    threads.start(n)
    assert {n: v for n, v in seen[0].items() if n in machine.THEIRS} == variables
    assert not {*machine.THEIRS} & {*os.environ}  # other processes do not inherit them
    monkeypatch.setattr(threads, "threading_layer", lambda: "omp")
    threads.start(n)
    assert len(seen) == 1
    assert followed == ([12] if n == 12 else [])  # threads that sleep anyway follow nothing

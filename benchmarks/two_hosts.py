"""Two hosts on one machine, joined by a link of limited rate: bytes on it, how much of it a step hides, an outage.

::

    sudo env "PATH=$PATH" python benchmarks/two_hosts.py [--model gpt2-124M] [-B 4] [-T 64] [--rate 1gbit ...]

The hosts are network namespaces with names of their own, on a bridge in a third namespace, so nothing of it meets the
machine's network; mpiexec reaches the other host through a script in the place of ssh. All is removed at the end. All
steps, those of the outage too, must have the losses and leave the weights of one process that takes them alone. Without
the right to make namespaces, the benchmark says so and ends.

A rank begins to send gradients during the backward, or for comparison after it. Hidden is what a step saves by that, as
a part of what it waits for them otherwise. No order can hide more than the time that the backward takes after its first
gradients are there, nor the gradients that come with its end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from jobs import ADDRESS, Job, ended

from cpuopt.comm.launch import module, mpiexec
from cpuopt.measure.comparison import compare

SIZE = 2
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host="$1"; shift
exec ip netns exec "$(grep "^$host " %(names)s | cut -d " " -f 2)" unshare --uts sh -c "hostname '$host'; $*"
"""
ENVIRONMENT = {"UCX_TLS": "tcp,self", "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_pml": "ob1"}
"""Variables that keep MPICH and Open MPI from the memory that both hosts share in truth."""


def run(*command: str) -> str:
    """Run a command; return what it prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Net:
    """Two hosts and the bridge between them.

    Parameters
    ----------
    folder : for the script in the place of ssh.
    """

    def __init__(self, folder: Path) -> None:
        mark = os.getpid()
        self.hosts = [f"cpuopt-{mark}-{n}" for n in "ab"]
        self.bridge = f"cpuopt-{mark}-bridge"
        self.addresses = [f"10.77.0.{n}" for n in (1, 2)]
        self.ssh = folder / "ssh"
        names = folder / "names"
        names.write_text("".join(f"{a} {h}\n" for a, h in zip(self.addresses, self.hosts, strict=True)))
        self.ssh.write_text(SSH % {"names": names})
        self.ssh.chmod(0o755)

    def make(self) -> None:
        """Make all; `OSError` where that is not allowed."""
        run("ip", "netns", "add", self.bridge)
        run("ip", "-n", self.bridge, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self.bridge, "link", "set", "br0", "up")
        for n, (host, address) in enumerate(zip(self.hosts, self.addresses, strict=True)):
            run("ip", "netns", "add", host)
            pair = "type", "veth", "peer", "name", "eth0", "netns", host
            run("ip", "-n", self.bridge, "link", "add", f"port{n}", *pair)
            run("ip", "-n", self.bridge, "link", "set", f"port{n}", "master", "br0", "up")
            run("ip", "-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                run("ip", "-n", host, "link", "set", device, "up")

    def remove(self) -> None:
        """End what runs on the hosts, and remove all."""
        for name in (*self.hosts, self.bridge):
            with suppress(OSError):
                for pid in run("ip", "netns", "pids", name).split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                run("ip", "netns", "del", name)

    def limit(self, rate: str) -> None:
        """Limit what each host sends."""
        for host in self.hosts:
            limit = "rate", rate, "burst", "256kb", "latency", "50ms"
            run("tc", "-n", host, "qdisc", "replace", "dev", "eth0", "root", "tbf", *limit)

    def cut(self, seconds: float) -> None:
        """Take the link down, and up again."""
        run("ip", "-n", self.bridge, "link", "set", "port1", "down")
        time.sleep(seconds)
        run("ip", "-n", self.bridge, "link", "set", "port1", "up")

    def sent(self) -> list[int]:
        """Return the bytes that each host has sent."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return [int(run("ip", "netns", "exec", host, "cat", path)) for host in self.hosts]

    def command(self) -> list[str]:
        """Return the command that starts a rank on each host."""
        found, *more = mpiexec(SIZE, module("rank_worker"))
        hosts = ",".join(self.addresses)
        if "--bind-to" in more:
            names = ",".join(f"{a}:1" for a in self.addresses)
            parameters = {"plm_ssh_agent": str(self.ssh), "prte_if_include": "eth0"}
            start = ["--host", names, *(x for pair in parameters.items() for x in ("--prtemca", *pair))]
            start += [x for name in (ADDRESS, "PYTHONPATH") for x in ("-x", name)]
        else:
            start = ["-launcher", "ssh", "-launcher-exec", str(self.ssh), "-hosts", hosts, "-iface", "eth0"]
        return [str(self.ssh), self.addresses[0], "exec", found, *start, *more]


@contextmanager
def two_hosts() -> Iterator[Net]:
    """Make the hosts; end with one line where that is not allowed."""
    with tempfile.TemporaryDirectory(prefix="cpuopt-hosts-") as folder:
        net = Net(Path(folder))
        try:
            try:
                net.make()
            except OSError as e:
                print(f"skipped, for it needs the right to make network namespaces: {e}")
                sys.exit(0)
            yield net
        finally:
            net.remove()


def sides(job: Job, losses: list[float], rounds: int) -> dict[bool, dict[str, float]]:
    """Take steps that begin to send during the backward and after it, in turns; return medians in ms.

    Parameters
    ----------
    losses : receives the loss of each step.
    """
    waits: dict[bool, list[float]] = {False: [], True: []}

    def trial(late: bool) -> float:
        answers = job.ask("steps", n=1, late=late)
        losses.extend(answers[0]["losses"])
        waits[late].append(max(a["rows"].get("reduce/Wait for ranks", 0.0) for a in answers))
        return max(a["step_ms"][0] for a in answers)

    found = compare(lambda: trial(False), lambda: trial(True), analyses=[rounds], control=False, warm_up=False)
    steps = {late: found.figures(letter) for late, letter in ((False, "A"), (True, "B"))}
    return {late: {"step": median(steps[late]), "wait": median(waits[late])} for late in steps}


def report(job: Job, net: Net, settings: Mapping[str, Any], a: argparse.Namespace) -> tuple[list[float], str]:
    """Measure all, and print it; return the losses of all steps, and the checksum of the weights."""
    losses: list[float] = []

    def steps(n: int, **how: Any) -> list[dict[str, Any]]:
        answers = job.ask("steps", n=n, **how)
        losses.extend(answers[0]["losses"])
        return answers

    facts = job.ask("init", settings=settings)
    if facts[0]["shared"]:
        raise SystemExit("the ranks share memory, as on one host")
    print(f"{a.model}, {a.B}x{a.T} a rank, 1 thread each, {facts[0]['library']}\n", flush=True)
    steps(1)
    before = net.sent()
    free = steps(2)
    on_link = [(b - x) / 2 for x, b in zip(before, net.sent(), strict=True)]
    for rank, (fact, counted) in enumerate(zip(facts, on_link, strict=True)):
        said = fact["sent"]["reduce"] + fact["sent"]["update"]
        print(
            f"host {rank} sends {counted / 1e6:,.1f} MB a step; the program's exchanges {said / 1e6:,.1f} MB "
            f"({counted / said:.3f})"
        )
    slowest = [max(ms) for ms in zip(*(f["step_ms"] for f in free), strict=True)]
    print(f"without a limit a step takes {min(slowest):,.0f} ms")
    window = min(max(x) for x in zip(*(f["window_ms"] for f in free), strict=True))
    print(f"\nThe backward goes on for {window:,.0f} ms after its first gradients.\n")
    print(
        "| rate | sent after the backward: step, ms | of it waiting, ms | sent during it: step, ms | of it waiting, ms "
        "| hidden | could be |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for rate in a.rate:
        net.limit(rate)
        steps(1)
        found = sides(job, losses, a.rounds)
        cells = " | ".join(f"{found[late][what]:,.0f}" for late in (True, False) for what in ("step", "wait"))
        whole = found[True]["wait"]
        most = min(window / whole, 1 - facts[0]["last"] / facts[0]["sent"]["reduce"])
        parts = (found[True]["step"] - found[False]["step"]) / whole, most
        print(f"| {rate} | {cells} | {' | '.join(f'{100 * x:.0f} %' for x in parts)} |", flush=True)
    start = time.perf_counter()
    job.begin("steps", n=2)
    time.sleep(found[False]["step"] / 2e3)
    net.cut(a.outage)
    losses += job.answers()[0]["losses"]
    print(f"\n2 steps in which the link was down for {a.outage:g} s: {time.perf_counter() - start:.1f} s")
    steps(1)
    return losses, " ".join(sorted({f["crc"] for f in job.ask("facts")}))


def main() -> None:
    """Measure on two hosts, and take the same steps in one process."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--model", default="gpt2-124M")
    p.add_argument("-B", type=int, default=4)
    p.add_argument("-T", type=int, default=64)
    p.add_argument("--rate", nargs="+", default=["1gbit"], help="of each direction, as tc writes it")
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--outage", type=float, default=6.0, metavar="SECONDS")
    a = p.parse_args()
    if missing := [tool for tool in ("ip", "tc", "unshare") if not shutil.which(tool)]:
        raise SystemExit(f"skipped, for there is no {missing[0]}")
    settings = {"model": a.model, "B": a.B, "T": a.T, "total_batch": SIZE * a.B * a.T, "threads": 1}
    with two_hosts() as net, Job(net.command(), SIZE, ENVIRONMENT) as job:
        losses, crc = report(job, net, settings, a)
    with Job(module("rank_worker"), 1) as job:
        job.ask("init", settings=settings)
        alone = job.ask("steps", n=len(losses))[0]["losses"]
        same = alone == losses and crc == job.ask("facts")[0]["crc"]
    print(f"{len(losses)} steps, losses and weights ({crc}) {'equal' if same else 'DIFFER from'} those of one process")
    sys.exit(not same)


if __name__ == "__main__":
    with ended():
        main()

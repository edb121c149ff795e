"""A Python for aarch64 that runs on this machine: Debian's, its libraries and ours in a folder, under qemu's user mode.

``python tests/arm/emulated.py`` makes it and prints its command. Nothing needs root, a mount or a chroot: apt resolves
and downloads in a state of its own, from the sources that this machine's apt knows, and pip from its own index.

qemu opens a file of the folder if it has one of that name, and else the machine's; other calls, such as mkdir, take the
machine's path. What opens folders one by one from the root, as our caches do, stays inside. So the cache lies in a
folder that only the root has, and what a run writes lies in one that only the machine has.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from cpuopt.files import cache_folder

CHECKOUT = Path(__file__).resolve().parents[2]
QEMU = ("qemu-aarch64-static", "qemu-aarch64")  # Debian 13 has the second, linked statically too
DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}
WHEELS = ("manylinux2014_aarch64", "manylinux_2_27_aarch64", "manylinux_2_28_aarch64")
LIMIT_S = 900.0
INSIDE = "/inside"
"""The emulated home, whose name must not be that of a folder on this machine."""


class MissingError(Exception):
    """What this machine lacks to emulate."""


def run(command: list[str]) -> None:
    """Run a command to its end; what it says last is in the error if it fails."""
    if not shutil.which(command[0]):
        raise MissingError(f"{command[0]} is not installed")
    made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S)
    if made.returncode:
        raise MissingError(f"{' '.join(command[:2])} failed: {' '.join(made.stdout.strip().splitlines()[-2:])}")


def debian(into: Path, architecture: str, *packages: str) -> None:
    """Download packages with all that they need, and unpack them into a folder, which need not be there."""
    state = into.with_name(f"{into.name}-apt")
    (state / "lists/partial").mkdir(parents=True)
    (state / "archives/partial").mkdir(parents=True)
    settings = {
        "APT::Architecture": architecture, "APT::Architectures": architecture, "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "", "Debug::NoLocking": "true", "Dir::State": str(state),
        "Dir::State::status": os.devnull,  # as if nothing were installed
        "Dir::Cache": str(state),
    }  # fmt: skip
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    run([*apt, "update"])
    run([*apt, "install", "--yes", "--download-only", *packages])
    for package in sorted((state / "archives").glob("*.deb")):
        run(["dpkg-deb", "--extract", str(package), str(into)])
    shutil.rmtree(state)


def emulator(folder: Path) -> Path:
    """Return qemu's program: the machine's, or that of Debian's package, whose others go."""
    if found := next(filter(None, map(shutil.which, QEMU)), None):
        return Path(found)
    unpacked = folder / "unpacked"
    debian(unpacked, DEBIAN.get(platform.machine(), platform.machine()), "qemu-user-static")
    found = next(p for name in QEMU if (p := unpacked / "usr/bin" / name).exists())
    kept = found.resolve().rename(folder / "qemu-aarch64")
    shutil.rmtree(unpacked)
    return kept


def requirements() -> list[str]:
    """List what cpuopt needs, in the versions that are installed here."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[^\w-]", needed)[0] for needed in project["dependencies"]]
    return [f"{name}=={version(name)}" for name in names]


def fill(folder: Path, needed: list[str]) -> None:
    """Make the root, its packages, and the command that runs its Python."""
    root, command, qemu = folder / "root", folder / "python", emulator(folder)
    debian(root, "arm64", "python3", "libgomp1", "libstdc++6")
    here = (root / "usr/bin/python3").readlink().name.removeprefix("python")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(root / "site"), "--only-binary=:all:"]
    run([*pip, "--implementation=cp", f"--python-version={here}", *(f"--platform={tag}" for tag in WHEELS), *needed])
    for place in (INSIDE.lstrip("/"), "tmp"):
        (root / place).mkdir(exist_ok=True)
    found = f'"{qemu}"' if qemu.parent != folder else '"$here/qemu-aarch64"'  # which moves with the folder
    start = f'exec {found} -0 "$0" -L "$here/root" "$here/root/usr/bin/python3" "$@"'
    command.write_text(f"#!/bin/sh\nhere=${{0%/*}}\n{start}\n")
    command.chmod(0o755)


def python() -> Path:
    """Return the command that runs an emulated Python; the first time, it is made.

    Raises
    ------
    MissingError
        If there is no qemu, no apt, or no package of that kind to be had.
    """
    needed = requirements()
    final = cache_folder("arm") / hashlib.sha256(repr(sorted(needed)).encode()).hexdigest()[:12]
    if not final.exists():
        part = final.with_name(f"{final.name}.part")
        shutil.rmtree(final.parent, ignore_errors=True)  # of other versions, or half of one
        part.mkdir(parents=True)
        fill(part, needed)
        part.rename(final)
    return final / "python"


def environment() -> dict[str, str]:
    """Return the variables with which it finds this checkout, and keeps its cache in its own root."""
    inside = {"HOME": INSIDE, "TMPDIR": "/tmp", "CPUOPT_CACHE_DIR": f"{INSIDE}/cache"}
    there = {name: value for name, value in os.environ.items() if not name.startswith(("CPUOPT_", "PYTHON", "XDG_"))}
    return {**there, **inside, "PYTHONPATH": f"{CHECKOUT}:/site", "PYTHONDONTWRITEBYTECODE": "1"}


if __name__ == "__main__":
    print(python())

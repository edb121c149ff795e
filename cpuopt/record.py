"""A run's folder: what was asked, on which machine, what came of it.

``runs/<time>-<name>/`` holds ``config.json``, ``machine.json``, ``metrics.jsonl``, ``main.log`` (in llm.c's format),
``profile.json`` and ``summary.json``.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any

import psutil

from .errors import UserError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PACKAGES = ("cpuopt", "numba", "llvmlite", "numpy", "threadpoolctl")


def check_name(name: str) -> str:
    """Return a run's name, if it can be a folder's name and stays inside ``runs/``.

    Raises
    ------
    UserError
        For anything but letters, digits, ``.``, ``_`` and ``-``, 64 at most, starting with a letter or digit.
    """
    if not NAME.fullmatch(name) or ".." in name:
        raise UserError(
            f"--run {name!r}: expected up to 64 letters, digits, '.', '_' or '-', starting with a letter or digit, "
            "because it names a folder in runs/"
        )
    return name


def machine() -> dict[str, Any]:
    """Describe the machine and the versions that run on it."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cores_online": os.cpu_count(),
        "caches": _caches(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": list(os.getloadavg()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": versions,
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _caches() -> dict[str, str]:
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = ((index / f).read_text().strip() for f in ("level", "type", "size"))
        except OSError:
            continue
        found[f"L{level}{'' if kind == 'Unified' else kind[0].lower()}"] = size
    return found


def finite(x: Any) -> Any:
    """Replace what JSON has no word for, NaN and infinity, by None."""
    if isinstance(x, Mapping):
        return {k: finite(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [finite(v) for v in x]
    return None if isinstance(x, float) and not isfinite(x) else x


def _new_folder(root: Path, stem: str) -> Path:
    """Make a folder that no other run has."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        names = (stem if n == 1 else f"{stem}.{n}" for n in count(1))
        path = next(root / name for name in names if not (root / name).exists())
        path.mkdir()
        return path
    except OSError as e:
        raise UserError(f"--runs {root}: {e.strerror}; name a directory that can be written with --runs DIR") from e


def keep(root: Path, kind: str, name: str, content: Mapping[str, Any]) -> Path:
    """Keep what was measured: ``<time>-<kind>-<name>/record.json`` in the folder of all runs.

    Parameters
    ----------
    kind : ``ab``, ``bench``, ``profile`` or ``tune``.
    name : what it was measured on; characters that no folder's name should have are replaced.
    content : anything that JSON can hold. Kind, format, time, commit and machine are added.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._")[:48]
    path = _new_folder(root, f"{time.strftime('%Y%m%d-%H%M%S')}-{kind}{'-' + safe if safe else ''}")
    head = {"kind": kind, "format": 1, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "commit": commit()}
    part = path / ".record.json.part"
    part.write_text(json.dumps(finite({**head, "machine": machine(), **content}), indent=1) + "\n")
    part.replace(path / "record.json")
    return path


def commit() -> str | None:
    """Name the commit of the checkout that this package runs from, with ``+`` where files differ from it."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=10)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "") if head.returncode == 0 else None


class Run:
    """A run's folder, made when the run starts.

    Parameters
    ----------
    root : the folder that holds all runs.
    name : of this one, already checked.
    config : everything that was asked for.
    """

    def __init__(self, root: Path, name: str, config: Mapping[str, Any]) -> None:
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{check_name(name)}"
        self.path = _new_folder(root, stem)
        self.write("config.json", config)
        self.write("machine.json", machine())
        self._metrics = (self.path / "metrics.jsonl").open("w", buffering=1)
        self._log = (self.path / "main.log").open("w", buffering=1)

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write one JSON file, whole or not at all."""
        part = self.path / f".{name}.part"
        part.write_text(json.dumps(finite(content), indent=2) + "\n")
        part.replace(self.path / name)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Add one step to ``metrics.jsonl`` and ``main.log``."""
        self._metrics.write(json.dumps(finite(metrics)) + "\n")
        m = metrics
        self._log.write(f"s:{m['step']} trl:{m['loss']:.4f} lr:{m['lr']:.6f} norm:{m['grad_norm']:.2f}\n")

    def validation(self, step: int, loss: float) -> None:
        """Add a validation loss to ``main.log``."""
        self._log.write(f"s:{step} tel:{loss:.4f}\n")

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self._metrics.close()
        self._log.close()

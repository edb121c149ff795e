"""What strangers install: sdist and wheel hold what they need, and the wheel runs where nothing else of cpuopt is."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import numpy as np
import pytest
from test_links import PAGES, links

ROOT = Path(__file__).parent.parent
NO_SOURCES = ".*", "build", "dist", "runs", "*.egg-info", "__pycache__", "*.pyc"
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def build(what, source, out):
    """Run setuptools as pip does, but with the installed one, since pip would download it."""
    out.mkdir()
    done = subprocess.run([sys.executable, "-c", BUILD, what, str(out)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The unpacked sdist."""
    here = tmp_path_factory.mktemp("package")
    copytree(ROOT, here / "source", ignore=ignore_patterns(*NO_SOURCES))
    with tarfile.open(build("build_sdist", here / "source", here / "sdist")) as archive:
        archive.extractall(here / "unpacked", filter="data")
    (found,) = (here / "unpacked").iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(sdist):
    """The wheel that pip builds from the sdist."""
    return build("build_wheel", sdist, sdist.parent.parent / "wheel")


def test_the_sdist_holds_what_its_pages_link_to(sdist):
    for page in PAGES:
        there = sdist / page.relative_to(ROOT)
        assert there.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
        missing = [target for target, _ in links(there) if target and not (there.parent / target).exists()]
        assert missing == [], page.name


@pytest.mark.parametrize("name", ["LICENSE", "Makefile", "mkdocs.yml", "examples/kernel.ipynb", "tests/golden/ops.npz"])
def test_the_sdist_holds_what_no_page_links_to(sdist, name):
    assert (sdist / name).read_bytes() == (ROOT / name).read_bytes()


def test_the_wheel_holds_every_file_of_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("cpuopt/")}
        others = {name.partition("/")[0] for name in archive.namelist()} - {"cpuopt"}
    package = (p for p in (ROOT / "cpuopt").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    assert held == {p.relative_to(ROOT).as_posix() for p in package}
    assert [name.rpartition(".")[2] for name in others] == ["dist-info"]


@pytest.mark.slow
def test_the_wheel_runs_in_an_empty_folder(wheel, tmp_path):
    """As `pip install WHEEL && cpuopt profile` does; the dependencies are those that are installed here."""
    new, empty = tmp_path / "new", tmp_path / "empty"
    empty.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(new)], check=True)
    python = new / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-index", "--no-deps", str(wheel)], check=True)
    libraries = Path(np.__file__).parent.parent
    (packages,) = new.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(f"{libraries}\n")  # whose own .pth files, as of this checkout, do nothing

    environment = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "NUMBA_NUM_THREADS")}
    in_empty = {"cwd": empty, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    where = subprocess.run([python, "-c", "import cpuopt; print(cpuopt.__file__)"], **in_empty)
    assert Path(where.stdout.strip()).is_relative_to(new), where.stderr
    profile = ["profile", "--model", "gpt2-tiny", "--steps", "2", "--threads", "1", "--html", "page.html", "--json"]
    done = subprocess.run([new / "bin" / "cpuopt", *profile], **in_empty)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["model"], found["steps"]) == ("gpt2-tiny", 2)
    assert {kernel["status"] for kernel in found["checked"]} <= {"right", "marginal"}
    assert "</html>" in (empty / "page.html").read_text(encoding="utf-8")

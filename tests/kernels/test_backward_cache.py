"""Generated backwards on disk."""

import importlib
import shutil
from pathlib import Path

import pytest

from cpuopt import ad


@pytest.mark.parametrize("file", ["reverse.py", "lower/rows.py"])
def test_a_changed_generator_writes_its_backwards_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """In whatever folder of it the change is."""
    load = importlib.import_module("cpuopt.kernels.generated.load")
    shutil.copytree(Path(ad.__file__).parent, tmp_path / "ad")
    monkeypatch.setattr(ad, "__file__", str(tmp_path / "ad" / "__init__.py"))
    before = load._generator.__wrapped__()
    assert load._generator.__wrapped__() == before
    with (tmp_path / "ad" / file).open("a") as f:
        f.write("# changed")
    assert load._generator.__wrapped__() != before

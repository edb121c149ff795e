"""`cpuopt.sweep`: kernels of one op over sizes, as ``cpuopt sweep`` measures them, in a script or a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import ops
from ..errors import UserError
from ..files import write_text
from ..files.outputs import check
from ..kernels import registry
from ..kernels.toolkit.threads import cores
from ..lab import sweep as lab
from ..lab import worker
from ..measure import rates
from ..ops.storage import WIDE
from ..report import rendered
from ..report import sweep as report
from ..report.html import sweep as page
from ..train.job import Settings
from ..wording import nearest
from .results import Report


@dataclass(repr=False)
class SweepReport(Report):
    """The result of `sweep`.

    Attributes
    ----------
    record : all figures, as in the record of ``cpuopt sweep``; ``rows`` has those of each size and variant.
    """

    record: dict[str, Any]

    def tables(self) -> rendered.Shown:
        """Return what ``cpuopt sweep`` prints."""
        return report.tables(self.record, None)

    def write_html(self, path: str | Path) -> None:
        """Write the page of ``cpuopt sweep --html``."""
        self._write(path, "write_html", page.report(self.record))

    def write_svg(self, path: str | Path) -> None:
        """Write the picture of ``cpuopt sweep --svg``."""
        self._write(path, "write_svg", page.picture(self.record))

    def write_csv(self, path: str | Path) -> None:
        """Write the figures of ``cpuopt sweep --csv``."""
        self._write(path, "write_csv", lab.csv(self.record))

    def _write(self, path: str | Path, what: str, text: str) -> None:
        check(Path(path), what)
        write_text(Path(path), text)


def _ask(do: str, **more: Any) -> dict[str, Any]:
    """Answer a request as the process of `lab.worker` does."""
    return dict(worker.HANDLERS[do](more, lambda text: None))


def sweep(
    op: str,
    over: Mapping[str, str | Sequence[int]],
    *,
    variants: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    model: str = lab.USUAL["model"],
    B: int = lab.USUAL["B"],
    T: int = lab.USUAL["T"],
    dtype: str = WIDE,
    threads: int | None = None,
    rounds: int = lab.ROUNDS,
    seed: int = 0,
) -> SweepReport:
    """Measure kernels of one op over sizes, with warm and cold caches, under the machine's roof.

    Each is checked on the arrays of a size before it is timed there; one that is wrong has no figures. They run in this
    process, so a kernel that crashes ends it; ``cpuopt sweep`` uses a process of its own. Ctrl-C keeps what was
    measured.

    Parameters
    ----------
    op : the op, as ``cpuopt kernels`` lists it.
    over : the sizes of each symbol that varies: numbers, or a range such as ``"16..4096"``, which doubles.
    variants : the kernels; ratios are to the first. By default the optimized one.
    sizes : sizes of other symbols. The rest are those of the op's first call in `model` at `B` rows of `T` tokens,
        stored as `dtype`.
    threads : all cores by default.
    rounds : how often each kernel is timed at a size.
    seed : the random seed of the inputs.

    Raises
    ------
    UserError
        For an op, a variant or a symbol that does not exist, or sizes that make no call.

    Examples
    --------
    >>> import cpuopt
    >>> found = cpuopt.sweep("gelu_forward", {"N": "1024..4096"}, rounds=3, threads=1)
    >>> [row["sizes"]["N"] for row in found.record["rows"]]
    [1024, 2048, 4096]
    """
    if op not in ops.ALL:
        raise UserError(f"sweep {op!r}: no such op; {nearest(op, ops.ALL)}")
    texts = [f"{s}={n if isinstance(n, str) else ','.join(map(str, n))}" for s, n in over.items()]
    chosen = lab.default_variants(op, ",".join(variants), [], registry.variants(op))
    job = Settings(model=model, B=B, T=T, dtype=dtype)
    plan = lab.plan(ops.ALL[op], lab.parse_all(texts), sizes or {}, job)
    n = threads or cores()
    found = lab.Sweep(op, chosen, plan, rates.roofs(n))
    found.run(lab.asking(_ask, op, {"threads": n, "seed": seed, "rounds": rounds}))
    return SweepReport(found.record(rates.raised, model=model, dtype=dtype, seed=seed))

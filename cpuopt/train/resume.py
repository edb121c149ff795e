"""What a resumed run keeps of its checkpoint, and what may have changed since."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .. import models
from ..data.batches import SORTED, Batches
from ..data.chats import Chats
from ..data.corpus import Corpus
from ..data.given import Given
from ..errors import UserError
from ..files.reading import from_json
from ..wording import count
from .checkpoint import Checkpoint
from .provenance import compare
from .settings import FREE, Settings, flag


def resumed(checkpoint: Checkpoint, given: Mapping[str, Any]) -> Settings:
    """Build the settings of a resumed run: the checkpoint's, with the changes in `given` that are allowed.

    Raises
    ------
    UserError
        Naming the settings that must not change.
    """

    def wrong(what: str) -> UserError:
        return UserError(f"--resume {str(checkpoint.run)!r}: {what}")

    try:
        there = vars(from_json(Settings, checkpoint.state["settings"], "settings"))
    except ValueError as e:
        raise wrong(f"{e}, in its state.json; take another run") from e
    moved = {"init"} if checkpoint.frozen and there["init"] else set()  # what is there is compared, not where it lies
    moved |= {"order"} if there["order"] is None else set()  # of a run in float32, or of an earlier version
    if checkpoint.state["settings"].get("local_steps"):
        raise wrong(
            "the run has local steps, with which this version cannot go on; start a new run from its weights with "
            f"--init {str(checkpoint.run)!r}"
        )
    other = {n: x for n, x in given.items() if n not in (*FREE, *moved) and x != there[n]}
    if isinstance(there["model"], str) and models.is_own(there["model"]):
        if "model" not in given:
            raise wrong(
                "the run's model is in a file of code, which no checkpoint starts by itself; if you trust the file, "
                f"name it: --model {there['model']}"
            )
        if models.is_own(other.get("model", "")) and str(models.parse(other["model"])) == checkpoint.state["model"]:
            del other["model"]  # the same, from another folder; what is in the file is compared
    if other:
        had = {n: f"no {flag(n)}" if there[n] is None else f"{n} {there[n]!r}" for n in other}
        if "model" in other and there["init"]:
            had["model"] = f"the model of --init {there['init']!r}"
        flags = ", ".join(f"{had[n]}, not {x!r}" for n, x in other.items())
        raise wrong(f"the run has {flags}; leave that out, or start a new run")
    if there["kernels"] and "kernels" not in given:
        flags = " ".join(f"--kernels {file!r}" for file in there["kernels"])
        raise wrong(
            "the run has kernels of its own, which are code that no checkpoint starts by itself; if you trust these "
            f"files, name them: {flags}"
        )
    settings, done = Settings(**there | dict(given)), checkpoint.state["step"]
    complete = done >= settings.steps and not given.keys() & {"save", "epochs"}
    if complete and settings.save and os.path.lexists(settings.save):
        raise wrong(
            f"the run is complete after {count(done, 'step')}, and its --save {settings.save!r} is there; to go on, "
            "give more steps with --steps N, and another --save PATH"
        )
    return settings


def since(
    resume: Checkpoint,
    settings: Settings,
    data: Corpus | Given | Chats,
    batches: object,
    made_by: Mapping[str, Mapping[str, str]],
    accept: bool,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Compare a run with the checkpoint that it continues from; return all accepted changes, and notes.

    Parameters
    ----------
    made_by : the code of the run, of `provenance.made_by`.
    accept : whether other kernels, rewrites and orders of the text are accepted.

    Raises
    ------
    UserError
        For another text, and for other kernels, rewrites or another order of the text if that is not accepted.
    """
    there = resume.state["corpus"]
    if there not in (data.fingerprint, data.ends):
        raise UserError(f"--data {settings.data} holds other text than when {str(resume.path)!r} was written")
    then = from_json(Settings, resume.state["settings"], "settings")
    refused, notes = compare(resume.state.get("made_by"), made_by, rewritten(then, settings))
    if isinstance(batches, Batches) and there == data.ends:
        notes.append("the checkpoint knows the sizes and the ends of its text only, so the rest may be another now")
        if batches.n_windows > SORTED:
            refused.append(f"the order of the text, for {batches.n_windows} rows are now shuffled without sorting them")
    if refused and not accept:
        raise UserError(
            f"--resume {str(resume.run)!r}: {'; '.join(refused)}: resuming would change the run; "
            "restore it, or accept the change with --accept-changes"
        )
    before = resume.state.get("changes", [])
    return (*before, *(f"after step {resume.state['step']}: {text}" for text in refused)), (*refused, *notes)


def rewritten(then: Settings, now: Settings) -> str:
    """Return which setting of a resumed run adds or leaves out the rewrite ``update``; ``""`` if none does."""
    if then.rewrites == now.rewrites:
        return ""
    if now.two_pass:
        return f"{now.two_pass} leaves out the rewrite 'update', which the run had"
    return f"without {then.two_pass} the rewrite 'update' comes in, which the run did not have"

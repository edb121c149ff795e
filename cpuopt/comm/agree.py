"""What all ranks must agree on before one of them writes anything: that nothing is wrong, and what they train."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from ..errors import UserError
from . import Comm


class CommonError(UserError):
    """An error that all ranks have: one of them shows it, and all end; `word` is that of a `RefusedError`."""

    def __init__(self, text: str, word: str = "") -> None:
        super().__init__(text)
        self.word = word


class Agreement:
    """A block in which every rank gets ready: a `UserError` of one rank becomes that of all.

    If ranks exchange something within, they `settle` first.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def __enter__(self) -> Agreement:
        return self

    def settle(
        self,
        facts: Mapping[str, Any] | None = None,
        kernels: Mapping[str, str] | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Wait for all ranks, and check that all are ready for the same.

        Parameters
        ----------
        facts : what must be the same on all ranks, by the words of an error; of JSON's types.
        kernels : digests of kernels, likewise. A rank whose share is empty lacks some; the others are compared.

        Raises
        ------
        CommonError
            The same on all ranks, naming the first fact that differs, and the first rank that has another one.
        """
        here = {"host": socket.gethostname(), "error": str(error or ""), "facts": facts or {}, "kernels": kernels or {}}
        here["word"] = getattr(error, "word", "")
        there = self.comm.everyone(json.loads(json.dumps(here)))
        errors = [t["error"] for t in there]
        wrong = next((r for r, e in enumerate(errors) if e), None)
        if wrong is not None:
            whose = "" if {*errors} == {errors[wrong]} else f"rank {wrong} on {there[wrong]['host']}: "
            raise CommonError(whose + errors[wrong], there[wrong].get("word", ""))
        for kind in "facts", "kernels":
            for what in dict.fromkeys(what for t in there for what in t[kind]):
                having = [r for r, t in enumerate(there) if kind == "facts" or what in t[kind]]
                (first, a), *others = [(r, there[r][kind].get(what)) for r in having]
                for rank, b in others:
                    if a != b:
                        raise CommonError(
                            f"rank {rank} on {there[rank]['host']} has {what} {b!r}, and rank {first} on "
                            f"{there[first]['host']} {a!r}: ranks train one model, so it must be the same on all"
                        )

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        told = isinstance(e, UserError) and not isinstance(e, CommonError) and self.comm.size > 1
        if e is None or told:
            self.settle(error=e)

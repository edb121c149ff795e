"""Errors that a user can fix: one exception, also for errors inside a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from .wording import guess, one_line

P = ParamSpec("P")
R = TypeVar("R")


class UserError(Exception):
    """A mistake in the user's input: one line with the value, what was expected, why, and what to do next.

    The command line prints the message after ``cpuopt: `` and exits with status 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def optional(name: str, what: str, extra: str) -> Any:
    """Import a module of an optional library.

    Parameters
    ----------
    what : the subject of the error, such as a flag or a file.
    extra : the extra of the package that installs it.

    Raises
    ------
    UserError
        If it is not installed.
    """
    library = name.partition(".")[0]
    try:
        import_module(library)
        return import_module(name)
    except ModuleNotFoundError:
        raise UserError(
            f"{what} needs the library {library}, which is not installed; pip install "
            f"'cpuopt[{extra}]' (in a clone: pip install -e '.[{extra}]')"
        ) from None


def told(f: Callable[P, R], name: str = "") -> Callable[P, R]:
    """Refuse a call with arguments that f does not take, in one line that shows those it takes.

    Parameters
    ----------
    name : the name of f for whom it calls it; by default its own. The object before a dot is no argument.
    """
    takes, name = signature(f), name or f.__name__
    hidden = "self", name.partition(".")[0]

    @wraps(f)
    def call(*args: P.args, **given: P.kwargs) -> R:
        try:
            takes.bind(*args, **given)
        except TypeError as e:
            plain = [p.replace(annotation=p.empty) for p in takes.parameters.values() if p.name not in hidden]
            known = [p.name for p in plain]
            unknown = [f"({word}=...): no such keyword{guess(word, known)}" for word in given if word not in known]
            shown = takes.replace(parameters=plain, return_annotation=takes.empty)
            raise UserError(f"{name}{(*unknown, f': {e}')[0]}; expected {name}{shown}") from None
        return f(*args, **given)

    return call


def blamed(e: BaseException, kernel: str, layer: str) -> BaseException:
    """Name the kernel that raised; an interrupt or a `UserError` stays as it is."""
    if isinstance(e, KeyboardInterrupt | UserError):
        return e
    return UserError(f"{kernel} raised {type(e).__name__}: {e}, in layer {layer!r}")


REFUSED = WRONG, CHEATING, COMPILE_ERROR, BY_RULE, UNCHECKED = (
    *("wrong", "cheating", "compile error", "refused by rule", "unchecked"),
)
"""The words of a refused kernel; `check.result.WORDS` says what they mean."""


class RefusedError(UserError):
    """A kernel that nothing runs. The exit status is that of `check.result.exit_status`.

    Attributes
    ----------
    word : a word of `REFUSED`; any other, which another process may give, is ``wrong``.
    witness : where it fails: kernel, case, argument, index, got and want, as far as there are any.
    """

    def __init__(self, text: str, word: str = WRONG, witness: Mapping[str, Any] | None = None) -> None:
        super().__init__(text)
        self.word, self.witness = word if word in REFUSED else WRONG, {**(witness or {})}

    def to_json(self) -> dict[str, Any]:
        """Return what every verb prints with ``--json`` for a refused kernel."""
        return {"verdict": self.word, "reason": str(self), "witness": self.witness}

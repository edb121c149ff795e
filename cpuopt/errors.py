"""Errors that a user can mend: one exception, also for what a kernel raises."""

from .wording import one_line


class UserError(Exception):
    """A mistake in what the user gave: one line that says what came, what was expected, why, and what to do next.

    The command line prints the message after ``cpuopt: `` and exits with status 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def blamed(e: BaseException, kernel: str, layer: str) -> BaseException:
    """Say which kernel raised; what the user asked for, an interrupt, stays as it is."""
    if isinstance(e, KeyboardInterrupt | UserError):
        return e
    return UserError(f"{kernel} raised {type(e).__name__}: {e}, in layer {layer!r}")

"""Errors that a user can fix: one exception, also for errors inside a kernel."""

from .wording import one_line


class UserError(Exception):
    """A mistake in the user's input: one line with the value, what was expected, why, and what to do next.

    The command line prints the message after ``cpuopt: `` and exits with status 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def blamed(e: BaseException, kernel: str, layer: str) -> BaseException:
    """Name the kernel that raised; an interrupt or a `UserError` stays as it is."""
    if isinstance(e, KeyboardInterrupt | UserError):
        return e
    return UserError(f"{kernel} raised {type(e).__name__}: {e}, in layer {layer!r}")

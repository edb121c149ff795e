"""The one exception for what a user can cause and mend."""

from .wording import one_line


class UserError(Exception):
    """A mistake in what the user gave: one line that says what came, what was expected, why, and what to do next.

    The command line prints the message after ``cpuopt: `` and exits with status 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))

"""``python -m cpuopt``, and the ``cpuopt`` command."""

import sys
from io import TextIOWrapper


def main() -> int:
    """Run the command; return its status, which is 130 after a Ctrl-C at any time."""
    try:
        from .signals import never_lost

        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a dot of a table is "?" where the locale has none
        with never_lost():
            from . import cli

            return cli.main()
    except KeyboardInterrupt:
        print("cpuopt: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

"""``python -m cpuopt``, and the ``cpuopt`` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())

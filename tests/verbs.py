"""Verbs as tests run them, in this process."""

import json

from cpuopt import cli


def ran(capsys, *flags):
    """Run a verb that succeeds; return what it prints as JSON."""
    assert cli.main([*flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *flags):
    """Run a verb that refuses; return its one line."""
    assert cli.main([*flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line

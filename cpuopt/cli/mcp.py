"""``cpuopt mcp``: offer the judge to a program, over the Model Context Protocol on stdin and stdout.

It needs the extra ``mcp``: pip install 'cpuopt[mcp]'. The tools list tasks, describe one, check, time and inspect a
candidate, profile a training step, submit to the board, read it, and adopt its best.

Examples::

    cpuopt mcp
    cpuopt mcp --threads 1 --runs runs
"""

from __future__ import annotations

import argparse

from ..errors import UserError
from ..train import settings
from . import common
from .common import shared, start_numba


def flags(p: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    settings.flags(p, "threads")
    shared(p, "--runs")


def run(args: argparse.Namespace) -> int:
    """Run the verb until stdin closes; return its exit status."""
    common.check_targets(args)
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError:
        raise UserError("mcp: its library is not installed; pip install 'cpuopt[mcp]'") from None
    start_numba(args.threads)
    from .. import kernels  # noqa: F401  (registers them)
    from ..judge.desk import Desk, functions

    with Desk(args.runs, args.threads) as desk:
        server = MCPServer("cpuopt")
        for name, function in functions(desk).items():
            server.add_tool(function, name=name)
        server.run("stdio")
    return 0

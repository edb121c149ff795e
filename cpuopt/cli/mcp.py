"""``cpuopt judge --mcp``: the judge for a program, over the Model Context Protocol on stdin and stdout.

The tools list tasks, describe one, check, time and inspect a candidate, profile a training step, submit to the board,
read it, and adopt its best. A client names a preset as the model, or the --model given here.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, get_type_hints

from .. import __version__
from ..errors import optional
from ..wording import one_line
from .common import start_numba

if TYPE_CHECKING:
    from ..judge.desk import Desk


def run(args: argparse.Namespace) -> int:
    """Answer requests until stdin closes; return the exit status."""
    optional("mcp.server.lowlevel", "--mcp", "mcp")
    start_numba(args.threads)
    from .. import kernels  # noqa: F401  (registers them)
    from ..judge.desk import Desk

    with Desk(args.runs, args.threads, files=args.kernels, models=[args.model]) as desk:
        asyncio.run(serve(desk))
    return 0


async def serve(desk: Desk) -> None:
    """Answer the protocol's requests; calls wait for each other, in one thread that lives as long as the judge."""
    import mcp_types as types
    from anyio import create_memory_object_stream, create_task_group
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server
    from mcp.shared.message import SessionMessage
    from pydantic import ValidationError

    from ..judge.desk import functions, request, require_text, said

    async def listed(context: Any, params: Any) -> Any:
        return types.ListToolsResult(
            tools=[
                types.Tool(name=name, description=inspect.getdoc(function), input_schema=schema(function))
                for name, function in functions(desk).items()
            ]
        )

    async def called(context: Any, params: Any) -> Any:
        asked = partial(request, desk, params.name, params.arguments or {})
        try:
            found = await asyncio.get_running_loop().run_in_executor(alone, asked)
        except Exception as e:
            return types.CallToolResult(content=[types.TextContent(type="text", text=said(e))], is_error=True)
        text = json.dumps(found, allow_nan=False)
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], structured_content=found)

    def refusal(e: Exception) -> Any:
        """Answer a line that is no message of the protocol; its id is told if Python finds one."""
        about = e.errors()[0] if isinstance(e, ValidationError) else {"msg": str(e), "input": ""}
        try:
            asked = json.loads(about["input"])["id"]
            require_text(asked)
        except (ValueError, LookupError, TypeError, RecursionError):
            asked = None
        error = types.ErrorData(code=types.PARSE_ERROR, message=one_line(about["msg"]))
        id_ = asked if type(asked) in (int, str) else None
        return SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=id_, error=error))

    async def sift() -> None:
        async with send:
            async for item in read:
                await (write.send(refusal(item)) if isinstance(item, Exception) else send.send(item))

    server: Any = Server("cpuopt", version=__version__, on_list_tools=listed, on_call_tool=called)
    send, received = create_memory_object_stream[Any](0)
    with ThreadPoolExecutor(1) as alone:
        async with stdio_server() as (read, write), create_task_group() as group:
            group.start_soon(sift)
            await server.run(received, write, server.create_initialization_options())


def schema(function: Any) -> dict[str, Any]:
    """Describe a function's parameters, as JSON Schema does."""
    names = {str: "string", int: "integer", bool: "boolean"}
    hints, known = get_type_hints(function), inspect.signature(function).parameters.values()
    shown: dict[str, Any] = {}
    for p in known:
        shown[p.name] = {"type": names[hints[p.name]]} | ({} if p.default is p.empty else {"default": p.default})
    needed = [p.name for p in known if p.default is p.empty]
    return {"type": "object", "properties": shown, "required": needed, "additionalProperties": False}

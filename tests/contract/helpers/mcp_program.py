"""`fp8scope mcp` as a process, with the SDK's client connected to it."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from mcp import Client as McpClient
from mcp import StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp_types import CallToolResult, TextContent


@dataclass
class McpProgram:
    """Starts `fp8scope mcp` for a token, and runs a coroutine with a client that is connected to it."""

    url: str
    token: str
    log: Path
    arguments: Sequence[str] = ()

    def __call__(self, body: Callable[[McpClient], Awaitable[None]]) -> str:
        """Run the body; returns what the program wrote to standard error."""

        async def connected() -> None:
            with self.log.open("w") as log:
                async with McpClient(stdio_client(self.parameters(), errlog=log)) as client:
                    await body(client)

        anyio.run(connected)
        return self.log.read_text()

    def parameters(self) -> StdioServerParameters:
        environment = {"FP8SCOPE_URL": self.url, "FP8SCOPE_TOKEN": self.token}
        arguments = ["-m", "fp8scope", "mcp", *self.arguments]
        return StdioServerParameters(command=sys.executable, args=arguments, env=environment)


def text_of(result: CallToolResult) -> str:
    """The short text of an answer."""
    (part,) = result.content[:1]
    assert isinstance(part, TextContent)
    return part.text


async def content_of(client: McpClient, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, text_of(result)
    assert isinstance(result.structured_content, dict)
    return result.structured_content


async def refusal_of(client: McpClient, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error and result.structured_content is None, (tool, arguments)
    return text_of(result)

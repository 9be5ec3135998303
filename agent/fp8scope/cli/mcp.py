"""`fp8scope mcp`: serve the project's runs to an agent, by the Model Context Protocol."""

import argparse
import sys

from fp8scope.cli.reading.common import REFUSED, WRONG_USE, client_of
from fp8scope.client.plain_text import printable
from fp8scope.config import ConfigurationError

PATIENCE = 10.0
"""Seconds for which a request is repeated: programs end a tool that takes long."""
MISSING = "`fp8scope mcp` needs the package mcp, which is missing: pip install 'fp8scope[mcp]'"


def mcp(arguments: list[str]) -> int:
    """Serve the project to an agent by the Model Context Protocol, on standard input and output."""
    parser = argparse.ArgumentParser(
        prog="fp8scope mcp",
        description=mcp.__doc__,
        epilog="A program starts it; docs/mcp.md has the configuration of common ones.",
    )
    parser.add_argument("--url", help="the server's address (default: FP8SCOPE_URL, or `fp8scope login`)")
    parser.add_argument("--project", help="the project whose login to use")
    parser.add_argument(
        "--json-text",
        action="store_true",
        help="also write the structured content as text, for programs that read no structured content",
    )
    options = parser.parse_args(arguments)
    try:
        # It takes a second to import, and needs a package of its own.
        from fp8scope.mcp_server.server import serve
    except ModuleNotFoundError as error:
        text = MISSING if (error.name or "").partition(".")[0] in ("mcp", "mcp_types") else str(error)
        print(f"fp8scope mcp: {text}", file=sys.stderr)
        return REFUSED
    try:
        client = client_of(options, patience=PATIENCE)
    except ConfigurationError as error:
        print(f"fp8scope mcp: {printable(error)}", file=sys.stderr)
        return WRONG_USE
    serve(client, with_json=options.json_text)
    return 0

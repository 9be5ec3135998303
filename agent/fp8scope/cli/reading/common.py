"""Parts of all subcommands that read: options, the client, JSON, and the exit status."""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from typing import Any, Final

import numpy as np

from fp8scope.client import Client, ClientError
from fp8scope.client.plain_text import printable
from fp8scope.config import ConfigurationError

OK, REFUSED, WRONG_USE, NO = 0, 1, 2, 3
"""Exit statuses: refused or unreachable; a wrong option or search; no verdict, or a run that failed."""
BROKEN_PIPE: Final = 141
"""As of a program that SIGPIPE ends."""
TIMEOUT: Final = 30.0


def parser_of(name: str, summary: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every subcommand has."""
    parser = argparse.ArgumentParser(
        prog=f"fp8scope {name}",
        description=summary,
        epilog="Exit status: 0; 1 if the server refuses or does not answer; 2 for a wrong option or search. "
        "docs/client.md has the keys of --json.",
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.add_argument("--url", help="the server's address (default: FP8SCOPE_URL, or `fp8scope login`)")
    parser.add_argument("--project", help="the project whose login to use")
    return parser


def client_of(options: argparse.Namespace, *, patience: float = TIMEOUT) -> Client:
    """The client for the options of a command. Raises ConfigurationError without a server."""
    return Client(options.url, project=options.project, patience=patience)


def answered(name: str, body: Callable[[], int]) -> int:
    """Run a command, and return its exit status; what goes wrong is a line on standard error."""
    try:
        status = body()
        sys.stdout.flush()
        return status
    except ConfigurationError as error:
        return _failed(name, error, WRONG_USE)
    except ClientError as error:
        return _failed(name, error, WRONG_USE if error.is_about_the_question else REFUSED)
    except BrokenPipeError:
        # Python would complain at its end, when it writes what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _failed(name: str, error: Exception, status: int) -> int:
    print(f"fp8scope {name}: {printable(error)}", file=sys.stderr)
    return status


def write_json(value: Any) -> None:
    """Write a value as a line of JSON, with NaN and infinities as the strings of docs/wire.md."""
    # In ASCII, so that no character of a name reaches the terminal.
    print(json.dumps(as_json(value), allow_nan=False))


def as_json(value: Any) -> Any:
    """A value of the client with the types of JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        return as_json(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): as_json(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray):
        return as_json(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [as_json(entry) for entry in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value

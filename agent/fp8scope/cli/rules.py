"""`fp8scope rules`: the alert rules of a project as a YAML file. The server reads and writes the YAML."""

import argparse
import sys
from pathlib import Path
from typing import Any

import urllib3

from fp8scope.cli.server import server_settings
from fp8scope.config import ConfigurationError, Settings
from fp8scope.delivery.transport import NextAction, classify
from fp8scope.importing.posting import TransferError

MAX_BYTES = 1 << 20
ANSWER_SECONDS = 60.0
MARKS = {"created": "+", "changed": "~", "removed": "-"}


def rules(arguments: list[str]) -> int:
    """Write a project's alert rules to a YAML file, or apply one to it."""
    options = _parser().parse_args(arguments)
    try:
        settings = server_settings(options.url, options.project)
        return _export(settings, options) if options.action == "export" else _apply(settings, options)
    except (ConfigurationError, TransferError, OSError, UnicodeDecodeError) as error:
        print(f"fp8scope rules: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fp8scope rules", description=rules.__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="{export,apply}")
    export = actions.add_parser("export", help="write the rules to a file, or to standard output")
    export.add_argument("file", nargs="?", type=Path, help="default: standard output")
    apply = actions.add_parser("apply", help="create and change rules as a file says")
    apply.add_argument("file", type=Path, help="a YAML file; - for standard input")
    apply.add_argument(
        "--check", action="store_true", help="change nothing; show what would change, and exit with 3 if any"
    )
    apply.add_argument("--prune", action="store_true", help="also remove rules that the file does not have")
    for subparser in (export, apply):
        subparser.add_argument(
            "--url", help="the server's address (default: FP8SCOPE_URL, or `fp8scope login`)"
        )
        subparser.add_argument("--project", help="the project whose login to use")
    return parser


def _export(settings: Settings, options: argparse.Namespace) -> int:
    body = _request(settings, "GET", {}, None).decode()
    if options.file is None:
        print(body, end="")
    else:
        options.file.write_text(body, encoding="utf-8")
        print(f"{options.file}: written", file=sys.stderr)
    return 0


def _apply(settings: Settings, options: argparse.Namespace) -> int:
    is_stdin = str(options.file) == "-"
    text = sys.stdin.read(MAX_BYTES + 1) if is_stdin else options.file.read_text(encoding="utf-8")
    if len(text) > MAX_BYTES:
        raise TransferError(f"{options.file} is larger than {MAX_BYTES >> 20} MiB")
    flags = {name: "true" for name in ("check", "prune") if getattr(options, name)}
    try:
        outcome = classify(200, {}, _request(settings, "PUT", flags, text.encode()))
    except TransferError as error:
        raise TransferError(f"{options.file}: {error}") from None
    changes = [change for change in outcome.answer.get("changes", []) if change["what"] != "unchanged"]
    for change in changes:
        print(f"{MARKS[change['what']]} {change['title']}: {change['what']}")
        for name, (before, after) in change["fields"].items():
            print(f"    {name}: {_shown(before)} -> {_shown(after)}")
    if not changes:
        print("Nothing to change: the project has these rules.")
    elif options.check:
        print("Checked only: nothing was changed.")
    return 3 if changes and options.check else 0


def _shown(value: Any) -> str:
    return "(none)" if value is None else str(value)


def _request(settings: Settings, method: str, fields: dict[str, str], body: bytes | None) -> bytes:
    """Return the body of a successful response. Raises TransferError."""
    query = "&".join(f"{name}={value}" for name, value in fields.items())
    address = f"{settings.url}/api/v1/rules{f'?{query}' if query else ''}"
    headers = {"Authorization": f"Bearer {settings.token}", "Content-Type": "application/yaml"}
    pool = urllib3.PoolManager(
        retries=False, timeout=urllib3.Timeout(settings.connect_timeout, read=ANSWER_SECONDS)
    )
    try:
        response = pool.request(method, address, headers=headers, body=body, redirect=False)
    except urllib3.exceptions.HTTPError as error:
        raise TransferError(f"{settings.url}: {type(error).__name__}; try again") from error
    outcome = classify(response.status, response.headers, response.data)
    is_yaml = response.headers.get("Content-Type", "").startswith("application/yaml")
    if response.status != 200 or (method == "GET" and not is_yaml):
        raise TransferError(outcome.message or f"HTTP {response.status}")
    if method == "PUT" and outcome.action is not NextAction.DONE:
        raise TransferError(outcome.message)
    return response.data

"""`fp8scope login`: store a server's address and token for this user."""

import argparse
import getpass
import sys

from fp8scope.cli.server import UNKNOWN_RUN, probe
from fp8scope.config import ConfigurationError, Settings, check_token, check_url
from fp8scope.credentials import Login, credentials_path, save_login


def login(arguments: list[str]) -> int:
    """Store a server's address and token for this user's training scripts."""
    parser = argparse.ArgumentParser(prog="fp8scope login", description=login.__doc__)
    parser.add_argument("url", help="the dashboard's address, such as https://fp8scope.example.org")
    parser.add_argument(
        "--project", default="", help="use the token for this project only (init(project=...))"
    )
    parser.add_argument("--no-check", action="store_true", help="do not check the token with the server")
    options = parser.parse_args(arguments)
    try:
        url = check_url(options.url)
        token = check_token(_read_token())
    except ConfigurationError as error:
        print(f"fp8scope login: {error}", file=sys.stderr)
        return 2
    if not options.no_check and (problem := _problem(url, token)):
        print(f"fp8scope login: {problem} Nothing was stored.", file=sys.stderr)
        return 1
    path = credentials_path()
    save_login(path, Login(url, token, options.project))
    print(f"Stored in {path} (readable by you only).")
    return 0


def _read_token() -> str:
    """Read the token from a prompt, or from standard input if that is not a terminal.

    Not from the command line, which every user of the machine can read.
    """
    if sys.stdin.isatty():
        return getpass.getpass("Token (from the project's settings page; not shown): ")
    return sys.stdin.readline(1024)


def _problem(url: str, token: str) -> str:
    """Return why the server does not accept the token; empty if it does."""
    outcome = probe(Settings(url=url, token=token))
    if outcome.code == UNKNOWN_RUN:
        return ""
    if outcome.status == 401:
        return f"{url} does not accept this token: {outcome.message}"
    if outcome.status == 0:
        return f"{url} does not answer: {outcome.message}."
    return f"{url} is not an fp8scope dashboard: {outcome.message}."

"""`fp8scope login`: keep a server's address and a token for the training scripts of this user."""

import argparse
import getpass
import sys
import uuid
from dataclasses import replace

from fp8scope.config import (
    ConfigurationError,
    Login,
    Settings,
    check_token,
    check_url,
    credentials_path,
    save_login,
)
from fp8scope.delivery.transport import Outcome, Transport

CHECK_SECONDS = 10.0


def login(arguments: list[str]) -> int:
    """Keep a server's address and token for this user's training scripts."""
    parser = argparse.ArgumentParser(prog="fp8scope login", description=login.__doc__)
    parser.add_argument("url", help="the dashboard's address, such as https://fp8scope.example.org")
    parser.add_argument("--project", default="", help="keep it for this project only (init(project=...))")
    parser.add_argument(
        "--no-check", action="store_true", help="do not ask the server whether the token is good"
    )
    options = parser.parse_args(arguments)
    try:
        url = check_url(options.url)
        token = check_token(_read_token())
    except ConfigurationError as error:
        print(f"fp8scope login: {error}", file=sys.stderr)
        return 2
    if not options.no_check and (problem := check(url, token)):
        print(f"fp8scope login: {problem} Nothing was kept.", file=sys.stderr)
        return 1
    path = credentials_path()
    save_login(path, Login(url, token, options.project))
    print(f"Kept in {path} (readable by you only).")
    return 0


def _read_token() -> str:
    """The token from a prompt, or from standard input when that is no terminal. Never from the command line,
    which every user of the machine can read."""
    if sys.stdin.isatty():
        return getpass.getpass("Token (from the project's settings page; not shown): ")
    return sys.stdin.readline(1024)


def check(url: str, token: str) -> str:
    """Why this token does not work there; empty when it does."""
    settings = replace(Settings(url=url, token=token), read_timeout=CHECK_SECONDS)
    transport = Transport(settings)
    # A run that nobody has: a good token is told so, a bad one is told that.
    outcome = transport.send("GET", f"/runs/{uuid.UUID(int=0)}", b"")
    transport.close()
    return "" if outcome.code == "unknown_run" else _problem(url, outcome)


def _problem(url: str, outcome: Outcome) -> str:
    if outcome.status == 401:
        return f"{url} does not accept this token: {outcome.message}"
    if outcome.status == 0:
        return f"{url} does not answer: {outcome.message}."
    return f"{url} does not answer as an fp8scope dashboard does: {outcome.message}."

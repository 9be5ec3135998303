"""The command `fp8scope admin`."""

from __future__ import annotations

import argparse
import getpass
import os
import sys
from pathlib import Path

from django.db import DatabaseError

from fp8scope_dashboard.administration.database import connected
from fp8scope_dashboard.embedded.processes import ServerError
from fp8scope_dashboard.servers.configuration import DataDir, default_data_dir

LONGEST_PASSWORD = 4096
ROLES = ("viewer", "member", "admin")


class AdminError(Exception):
    """The command cannot do what it was asked for; the message says what to do."""


def admin(argv: list[str]) -> int:
    """Make a sign-in link, set a password or invite a person, on the server's machine."""
    options = _parser().parse_args(argv)
    data = DataDir(options.data_dir.expanduser().absolute())
    try:
        if options.action == "password" and options.stdin:
            options.password = _password_from_stdin()
        with connected(data) as runs:
            _act(options, data, runs)
    except (AdminError, ServerError) as error:
        print(f"fp8scope admin: {error}", file=sys.stderr)
        return 1
    except UnicodeError:
        print("fp8scope admin: a name or the password is not valid UTF-8", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    return 0


def _act(options: argparse.Namespace, data: DataDir, runs: bool) -> None:
    # Its models can be imported only now that Django is set up.
    from fp8scope_dashboard.accounts.people import PeopleError

    actions = {"link": _link, "password": _password, "invite": _invite}
    try:
        actions[options.action](options, data)
    except PeopleError as error:
        raise AdminError(str(error)) from error
    except DatabaseError as error:
        reason = str(error).strip().partition("\n")[0]
        raise AdminError(
            f"the database refused: {reason}. If this is another version of fp8scope than the server's, "
            "start the server with this version once: it brings the tables up to date"
        ) from error
    if not runs:
        _note("The server does not run: start it with `fp8scope up`.")


def _link(options: argparse.Namespace, data: DataDir) -> None:
    from fp8scope_dashboard.accounts.people import person_named

    address = _address(options, data)
    _print_link(person_named(options.user).username, address)


def _password(options: argparse.Namespace, data: DataDir) -> None:
    from fp8scope_dashboard.accounts.people import person_named, set_password

    user = person_named(options.user)
    set_password(user, options.password if options.stdin else _ask_password(user.username))
    _note(f"The password of {user.username} is set. Every browser that was signed in must sign in again.")


def _invite(options: argparse.Namespace, data: DataDir) -> None:
    from fp8scope_dashboard.accounts.models import Role
    from fp8scope_dashboard.accounts.people import invite, project_named

    address = _address(options, data)
    project = project_named(options.project) if options.project else None
    user = invite(options.name, options.email, project, Role(options.role))
    member = f"a {options.role} of {project.slug}" if project else "in no project: --project SLUG names one"
    _note(f"{user.username} can sign in, {member}.")
    _print_link(user.username, address)


def _print_link(name: str, address: str) -> None:
    """The link alone goes to standard output, so that a script can take it; it is a secret."""
    from fp8scope_dashboard.accounts.models import User
    from fp8scope_dashboard.accounts.services import LINK_LIFETIME, create_sign_in_link

    link = create_sign_in_link(User.objects.get(username=name), address)
    hours = LINK_LIFETIME.total_seconds() / 3600.0
    _note(f"This link signs {name} in, once, within {hours:.0f} hours:")
    print(link, flush=True)


def _address(options: argparse.Namespace, data: DataDir) -> str:
    """Where the link leads: as asked for, as the environment says, or as `up` last served it."""
    address = options.url or os.environ.get("FP8SCOPE_BASE_URL") or data.address()
    if not address:
        raise AdminError(
            "the server's address is not known: give it with --url, as in https://fp8.example.org"
        )
    return str(address)


def _ask_password(name: str) -> str:
    if not sys.stdin.isatty():
        raise AdminError("there is no terminal to ask for the password: give --stdin, and the password there")
    first = getpass.getpass(f"New password of {name}: ")
    if getpass.getpass("The same again: ") != first:
        raise AdminError("the two passwords differ; nothing was changed")
    return first


def _password_from_stdin() -> str:
    text = sys.stdin.readline(LONGEST_PASSWORD + 2).rstrip("\r\n")
    if not text:
        raise AdminError("standard input holds no password: write it there, as one line")
    if len(text) > LONGEST_PASSWORD:
        raise AdminError(f"the password is longer than {LONGEST_PASSWORD} characters")
    return text


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp8scope admin",
        description=f"{admin.__doc__} It needs access to the data directory, or DATABASE_URL.",
        epilog="With DATABASE_URL it works on that database, else on that of `fp8scope up`, running or not.",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=default_data_dir(),
        help="the directory of `fp8scope up` (default: FP8SCOPE_DATA_DIR, else ~/.fp8scope)",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="{link,password,invite}")
    link = actions.add_parser("link", help="print a link that signs a person in, once")
    password = actions.add_parser("password", help="set a person's password; it is asked for")
    invite = actions.add_parser("invite", help="make a person, and print a link for them")
    for one in (link, password):
        one.add_argument("--user", metavar="NAME", help="default: the administrator")
    password.add_argument(
        "--stdin", action="store_true", help="read the password from standard input, one line"
    )
    invite.add_argument("name", metavar="NAME")
    invite.add_argument("--project", metavar="SLUG", help="make them a member of this project")
    invite.add_argument(
        "--role", choices=ROLES, default="member", help="in the project (default: %(default)s)"
    )
    invite.add_argument("--email", default="", metavar="ADDRESS")
    for one in (link, invite):
        one.add_argument(
            "--url", type=_url, help="the server's address (default: FP8SCOPE_BASE_URL, or `up`'s)"
        )
    return parser


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")) or len(text) > 500:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not an address: give http://... or https://...")
    return text

"""The command `fp8scope admin`."""

from __future__ import annotations

import argparse
import getpass
import os
import sys
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError

from fp8scope_dashboard.administration import cold_store, distribution, sql_readers
from fp8scope_dashboard.administration.database import connected
from fp8scope_dashboard.administration.errors import AdminError
from fp8scope_dashboard.embedded.processes import ServerError
from fp8scope_dashboard.servers.configuration import DataDir, default_data_dir

LONGEST_PASSWORD = 4096
ROLES = ("viewer", "member", "admin")


def admin(argv: list[str]) -> int:
    """Make sign-in links, passwords, users and SQL logins, or arrange the store, on the server."""
    options = _parser().parse_args(argv)
    data = DataDir(options.data_dir.expanduser().absolute())
    try:
        if getattr(options, "stdin", False):
            options.password = _password_from_stdin()
        with connected(data) as is_running:
            _run_action(options, data, is_running)
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


def _run_action(options: argparse.Namespace, data: DataDir, is_running: bool) -> None:
    # Models can be imported only once Django is set up; this also applies below.
    from fp8scope_dashboard.accounts.people import PeopleError

    actions = {"link": _link, "password": _password, "invite": _invite, "remove": _remove, "rekey": _rekey}
    actions |= {"projects": _projects, "project": _project, "factor": _factor}
    actions |= {"sql-reader": sql_readers.change, "sql-readers": sql_readers.show}
    actions |= {"distribute": distribution.distribute, "nodes": distribution.show}
    actions |= {"rebalance": distribution.rebalance, "drain": distribution.drain, "cold": cold_store.change}
    try:
        actions[options.action](options, data)
    except PeopleError as error:
        raise AdminError(str(error)) from error
    except DatabaseError as error:
        reason = str(error).strip().partition("\n")[0]
        raise AdminError(
            f"the database reports an error: {reason}. If the server runs another version of fp8scope, start "
            "this version once with `fp8scope up` to migrate the database"
        ) from error
    if not is_running:
        _note("The server is not running. Start it with `fp8scope up`.")


def _link(options: argparse.Namespace, data: DataDir) -> None:
    from fp8scope_dashboard.accounts.people import person_named

    address = _address(options, data)
    _print_link(person_named(options.user).username, address)


def _password(options: argparse.Namespace, data: DataDir) -> None:
    from fp8scope_dashboard.accounts.people import person_named, set_password

    user = person_named(options.user)
    set_password(user, options.password if options.stdin else _ask_password(user.username))
    _note(f"The password of {user.username} is set. All browsers must sign in again.")


def _invite(options: argparse.Namespace, data: DataDir) -> None:
    from fp8scope_dashboard.accounts.models import Role
    from fp8scope_dashboard.accounts.people import invite, project_named

    address = _address(options, data)
    project = project_named(options.project) if options.project else None
    user = invite(options.name, options.email, project, Role(options.role))
    member = (
        f"a {options.role} of {project.slug}" if project else "without a project; --project SLUG adds one"
    )
    _note(f"Invited {user.username}, {member}.")
    _print_link(user.username, address)


def _remove(options: argparse.Namespace, data: DataDir) -> None:
    from fp8scope_dashboard.accounts.members import live_tokens
    from fp8scope_dashboard.accounts.models import Membership
    from fp8scope_dashboard.accounts.people import person_named, project_named
    from fp8scope_dashboard.audit.log import Actor
    from fp8scope_dashboard.audit.member_changes import counted, remove_member
    from fp8scope_dashboard.shared_reports.services import links_of

    project = project_named(options.project)
    membership = Membership.objects.filter(project=project, user__username=options.name).first()
    if membership is None:
        raise AdminError(f"{options.name!r} is not a member of {project.slug}")
    tokens = list(live_tokens(membership).values_list("pk", flat=True))
    links = list(links_of(project, membership.user).values_list("pk", flat=True))
    theirs = counted({"tokens": tokens, "links": links})
    keep = options.keep_tokens or (bool(theirs) and not _confirm(f"Revoke their {theirs}?"))
    remove_member(Actor(), membership, person_named(None) if keep else None)
    outcome = f" {theirs}: {'kept, as those of the administrator' if keep else 'revoked'}." if theirs else ""
    _note(f"Removed {options.name} from {project.slug}.{outcome} The project's settings page can undo it.")


def _projects(options: argparse.Namespace, data: DataDir) -> None:
    from fp8scope_dashboard.accounts.models import Project

    for project in Project.objects.order_by("slug"):
        print(f"{project.slug}\t{project.name}{' (archived)' if project.archived_at else ''}")


def _project(options: argparse.Namespace, data: DataDir) -> None:
    from fp8scope_dashboard.accounts import projects
    from fp8scope_dashboard.accounts.people import person_named, project_named
    from fp8scope_dashboard.audit.log import Actor, record
    from fp8scope_dashboard.audit.models import Action

    try:
        if options.new:
            owner = person_named(options.owner)
            project = projects.make(
                options.slug, options.name or options.slug, options.description or "", owner
            )
            changes = [f"made “{project.name}”"]
        else:
            project = project_named(options.slug)
            changes = projects.change(
                project, name=options.name, description=options.description, archived=options.archived
            )
    except projects.ProjectError as error:
        raise AdminError(str(error)) from error
    if changes:
        record(Actor(), project, Action.PROJECT, ", ".join(changes))
    _note(f"{project.slug}: {', '.join(changes) or 'nothing to change'}.")


def _confirm(question: str) -> bool:
    """Ask at a terminal; without one the answer is yes."""
    if not sys.stdin.isatty():
        return True
    return not input(f"{question} [Y/n] ").strip().lower().startswith("n")


def _rekey(options: argparse.Namespace, data: DataDir) -> None:
    from fp8scope_dashboard.accounts.second_factor import codes
    from fp8scope_dashboard.alerts.delivery.rekey import rekey

    try:
        count, unreadable = rekey()
    except ImproperlyConfigured as error:
        raise AdminError(str(error)) from error
    _note(f"Encrypted the settings of {count} channel{'' if count == 1 else 's'} with the present key.")
    if unreadable:
        raise AdminError(
            f"no key decrypts the settings of {', '.join(unreadable)}: add the former key to "
            "FP8SCOPE_SECRET_KEY_FALLBACKS and repeat this, or enter the settings again on the channels page"
        )
    apps, lost = codes.rekey()
    _note(f"Encrypted {apps} second factor{'' if apps == 1 else 's'} with the present key.")
    if lost:
        raise AdminError(
            f"no key decrypts the second factor of {', '.join(lost)}: add the former key to "
            "FP8SCOPE_SECRET_KEY_FALLBACKS and repeat this, or remove it with `fp8scope admin factor NAME "
            "--remove`"
        )


def _factor(options: argparse.Namespace, data: DataDir) -> None:
    from fp8scope_dashboard.accounts.people import person_named
    from fp8scope_dashboard.accounts.second_factor import codes
    from fp8scope_dashboard.accounts.signals import factor_changed

    user = person_named(options.name)
    stored = codes.authenticator_of(user)
    if not options.remove:
        _note(f"{user.username} {'has' if stored else 'has no'} second factor.")
    elif codes.remove(user):
        factor_changed.send(sender=type(user), user=user, text="removed by fp8scope admin", request=None)
        _note(f"Removed the second factor of {user.username}: a password or a link is enough to sign in.")
    else:
        _note(f"{user.username} has no second factor.")


def _print_link(name: str, address: str) -> None:
    """Print only the link to standard output, so that a script can read it. It is a secret."""
    from fp8scope_dashboard.accounts.models import User
    from fp8scope_dashboard.accounts.services import LINK_LIFETIME, create_sign_in_link

    link = create_sign_in_link(User.objects.get(username=name), address)
    hours = LINK_LIFETIME.total_seconds() / 3600.0
    _note(f"One-time sign-in link for {name}, valid for {hours:.0f} hours:")
    print(link, flush=True)


def _address(options: argparse.Namespace, data: DataDir) -> str:
    """The server's address: from --url, FP8SCOPE_BASE_URL, or the last start of `up`."""
    address = options.url or os.environ.get("FP8SCOPE_BASE_URL") or data.address()
    if not address:
        raise AdminError(
            "the server's address is unknown: set it with --url, for example https://fp8.example.org"
        )
    return str(address)


def _ask_password(name: str) -> str:
    if not sys.stdin.isatty():
        raise AdminError(
            "there is no terminal to ask for the password: use --stdin to read it from standard input"
        )
    first = getpass.getpass(f"New password of {name}: ")
    if getpass.getpass("Repeat the password: ") != first:
        raise AdminError("the passwords differ; nothing was changed")
    return first


def _password_from_stdin() -> str:
    text = sys.stdin.readline(LONGEST_PASSWORD + 2).rstrip("\r\n")
    if not text:
        raise AdminError("standard input contains no password: write it there as one line")
    if len(text) > LONGEST_PASSWORD:
        raise AdminError(f"the password is longer than {LONGEST_PASSWORD} characters")
    return text


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp8scope admin",
        description=f"{admin.__doc__} Needs access to the data directory, or DATABASE_URL.",
        epilog="Without DATABASE_URL the command uses the database of `fp8scope up`, running or not.",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=default_data_dir(),
        help="the directory of `fp8scope up` (default: FP8SCOPE_DATA_DIR, else ~/.fp8scope)",
    )
    actions = parser.add_subparsers(
        dest="action",
        required=True,
        metavar="{link,password,invite,remove,factor,rekey,projects,project,sql-reader,sql-readers,"
        "distribute,nodes,rebalance,drain,cold}",
    )
    link = actions.add_parser("link", help="print a one-time sign-in link for a user")
    password = actions.add_parser("password", help="set a user's password")
    invite = actions.add_parser("invite", help="create a user and print a sign-in link for them")
    remove = actions.add_parser("remove", help="remove a user from a project")
    factor = actions.add_parser("factor", help="show or remove a user's second factor")
    factor.add_argument("name", metavar="NAME")
    factor.add_argument("--remove", action="store_true", help="remove it, for a person who lost their phone")
    actions.add_parser(
        "rekey",
        help="encrypt the channels' settings and second factors with the present secret key, after a change",
    )
    actions.add_parser("projects", help="list the projects")
    project = actions.add_parser("project", help="make, rename, describe or archive a project")
    project.add_argument("slug", metavar="SLUG", help="its short name, as in its address")
    project.add_argument("--new", action="store_true", help="make it")
    project.add_argument("--owner", metavar="NAME", help="of a new one (default: the administrator)")
    project.add_argument("--name", metavar="NAME")
    project.add_argument("--description", metavar="TEXT")
    project.add_argument(
        "--archive", dest="archived", action="store_true", default=None, help="list it apart; it goes on"
    )
    project.add_argument("--unarchive", dest="archived", action="store_false", help="list it again")
    sql_readers.add_parsers(actions)
    distribution.add_parsers(actions)
    cold_store.add_parser(actions)
    for command in (link, password):
        command.add_argument("--user", metavar="NAME", help="default: the administrator")
    password.add_argument(
        "--stdin", action="store_true", help="read the password from standard input, one line"
    )
    invite.add_argument("name", metavar="NAME")
    invite.add_argument("--project", metavar="SLUG", help="add the user to this project")
    invite.add_argument(
        "--role", choices=ROLES, default="member", help="role in the project (default: %(default)s)"
    )
    invite.add_argument("--email", default="", metavar="ADDRESS")
    remove.add_argument("name", metavar="NAME")
    remove.add_argument("--project", metavar="SLUG", required=True, help="the project to remove them from")
    remove.add_argument(
        "--keep-tokens",
        action="store_true",
        help="their API tokens and links to reports go on, as those of the administrator"
        " (default: they are revoked; asked at a terminal)",
    )
    for command in (link, invite):
        command.add_argument(
            "--url", type=_url, help="the server's address (default: FP8SCOPE_BASE_URL, or `up`'s)"
        )
    return parser


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")) or len(text) > 500:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not an address: use http://... or https://...")
    return text

"""The actions `sql-reader` and `sql-readers` of `fp8scope admin`: logins that read the SQL views."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from fp8scope_dashboard.administration.errors import AdminError
from fp8scope_dashboard.servers.configuration import DataDir


def add_parsers(actions: Any) -> None:
    """Add the two actions to the parsers of `fp8scope admin`."""
    reader = actions.add_parser("sql-reader", help="make, change or remove a login that reads the SQL views")
    reader.add_argument("role", metavar="LOGIN", help="lower-case letters, digits and _")
    which = reader.add_mutually_exclusive_group()
    which.add_argument("--project", metavar="SLUG", help="it reads this project only")
    which.add_argument("--all-projects", action="store_true", help="the default for a new one")
    reader.add_argument("--seconds", type=int, help="the longest statement (default: 30)")
    reader.add_argument(
        "--stdin", action="store_true", help="read the password from standard input, one line"
    )
    reader.add_argument("--remove", action="store_true", help="remove it; its sessions end")
    actions.add_parser("sql-readers", help="list the logins that read the SQL views")


def change(options: argparse.Namespace, data: DataDir) -> None:
    """Make, change or remove a login. Only its password goes to standard output."""
    # Models can be imported only once Django is set up; this also applies below.
    from fp8scope_dashboard.sql_views import readers

    try:
        if options.remove:
            readers.remove_reader(options.role)
            print(f"Removed the login {options.role}.", file=sys.stderr)
        else:
            _make(options)
    except readers.ReaderError as error:
        raise AdminError(str(error)) from error


def _make(options: argparse.Namespace) -> None:
    from fp8scope_dashboard.accounts.people import project_named
    from fp8scope_dashboard.audit.log import Actor, record
    from fp8scope_dashboard.audit.models import Action
    from fp8scope_dashboard.sql_views import readers
    from fp8scope_dashboard.sql_views.models import SqlReader

    # What is not said stays: a new password must not let a login read more.
    present = SqlReader.objects.select_related("project").filter(role=options.role).first()
    project = present.project if present is not None and not options.all_projects else None
    if options.project:
        project = project_named(options.project)
    seconds = options.seconds
    if seconds is None:
        seconds = readers.DEFAULT_SECONDS if present is None else present.seconds
    chosen = getattr(options, "password", "")
    password = readers.make_reader(options.role, project, seconds=seconds, password=chosen)
    if project is not None:
        record(Actor(), project, Action.PROJECT, f"made or changed the SQL login “{options.role}”")
    which = f"the project {project.slug}" if project else "all projects"
    print(
        f"The login {options.role} reads {which} in the schema fp8scope_views, at most {seconds} s a "
        "statement. Histories of scalars follow within minutes.",
        file=sys.stderr,
    )
    if not chosen:
        print("Its password:", file=sys.stderr, flush=True)
        print(password, flush=True)


def show(options: argparse.Namespace, data: DataDir) -> None:
    """List the logins."""
    from fp8scope_dashboard.sql_views.models import SqlReader

    for reader in SqlReader.objects.select_related("project").order_by("role"):
        project = reader.project.slug if reader.project else "(all projects)"
        print(f"{reader.role}\t{project}\t{reader.seconds} s")

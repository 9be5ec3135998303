"""The sender of a batch: the token, the run and the writer of a message, read in one statement.

This runs for every batch. A statement for each of them takes several times as long, above all in Python.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID, uuid4

from fp8scope_dashboard.accounts.models import ApiToken, Scope, User
from fp8scope_dashboard.accounts.services import TOKEN_FORM, TOKEN_WORKS, digest_of, note_use
from fp8scope_dashboard.accounts.tokens import why_refused
from fp8scope_dashboard.api.auth import SENT_FIELDS, forbidden, unknown_run
from fp8scope_dashboard.api.responses import HAS_ALERTS, HAS_COMMANDS, Known, News
from fp8scope_dashboard.db import replica, sql
from fp8scope_dashboard.edge import callers
from fp8scope_dashboard.ingest.statements import KnownWriter
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.wire.errors import BadTokenError

logger = logging.getLogger(__name__)

_SENDER: Final = f"""
    SELECT token.id, token.project_id, token.scopes, token.last_used_at,
        writer.id, writer.rows_dropped, coalesce(cardinality(writer.catalogue), 0),
        {HAS_ALERTS}, {HAS_COMMANDS},
        {", ".join(f"run.{name}" for name in SENT_FIELDS)}
    FROM {ApiToken._meta.db_table} token
    LEFT JOIN {User._meta.db_table} creator ON creator.id = token.created_by_id
    LEFT JOIN runs_run run
        ON run.id = %(run)s AND run.project_id = token.project_id AND run.deleted_at IS NULL
    LEFT JOIN runs_writer writer ON writer.run_id = run.id AND writer.uuid = %(writer)s
    WHERE {TOKEN_WORKS}
"""


@dataclass(frozen=True, kw_only=True)
class SendingWriter:
    """The run that a message is about, its writer if it is not new, and whether there is news for it."""

    run: Run
    writer: KnownWriter | None
    news: News


def sender_of(secret: str, run_id: UUID, writer: UUID | None, received: Known) -> SendingWriter:
    """Authenticate a token that writes to a run, and read what storing its message needs.

    Args:
        writer: the writer of the message; None if it is not known yet.

    Raises:
        BadTokenError: the token is unknown, revoked or expired.
        ForbiddenError: it may not write runs.
        RefusalError: its project has no such run.
    """
    if not TOKEN_FORM.fullmatch(secret):
        raise BadTokenError
    parameters = {
        "digest": digest_of(secret),
        "run": run_id,
        # An id that no writer has: with NULL a distributed store would not find the statement's one node.
        "writer": uuid4() if writer is None else writer,
        "alerts": received.alerts_after,
        "commands": received.commands_after,
    }
    rows = sql.fetch(_SENDER, parameters, replica.PRIMARY)
    if not rows:
        callers.tokens.discard(secret)
        raise BadTokenError(why_refused(secret))
    (token, project, scopes, used_at, *of_writer), of_run = rows[0][:9], rows[0][9:]
    callers.tokens.add(secret, callers.Caller(token, project))
    note_use(token, used_at)
    if Scope.WRITE not in scopes:
        raise forbidden(ApiToken.objects.select_related("project").get(pk=token), Scope.WRITE)
    if of_run[0] is None:
        raise unknown_run(project, run_id)
    writer_id, dropped, catalogued, has_alerts, has_commands = of_writer
    return SendingWriter(
        run=_run(of_run),
        writer=None if writer_id is None else KnownWriter(writer_id, dropped, catalogued),
        news=News(has_alerts, has_commands),
    )


def _run(values: tuple[Any, ...]) -> Run:
    return Run.from_db(replica.PRIMARY, SENT_FIELDS, values)

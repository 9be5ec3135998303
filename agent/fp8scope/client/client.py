"""`fp8scope.Client`: reads runs, verdicts and alerts of a project."""

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from fp8scope.client import figures
from fp8scope.client.alerts import AlertDetails, AlertPage, RunAlert, read_alerts, read_details, read_page
from fp8scope.client.connection import PATIENCE, ClientError, Connection, RunNotFoundError
from fp8scope.client.fields import OLDER
from fp8scope.client.stored_run import StoredRun, read_run, rows_of
from fp8scope.client.verdicts import RunPair
from fp8scope.config import ConfigurationError, settings_from

RUNS_A_PAGE = 100
NO_SERVER = "no server is configured: run `fp8scope login ADDRESS`, or set FP8SCOPE_URL and FP8SCOPE_TOKEN."


class Client:
    """Reads what the pages of a project show. It is safe to use from several threads.

    >>> client = fp8scope.Client()                                        # doctest: +SKIP
    >>> for run in client.runs("state:failed lr>1e-3"):                   # doctest: +SKIP
    ...     print(run.name, run.verdict())

    Args:
        url, token: of the server; by default FP8SCOPE_URL and FP8SCOPE_TOKEN, then the login that `fp8scope
            login` stored. The token needs the scope *read*.
        project: selects one of several logins.
        timeout: seconds without a byte of an answer, after which a request is repeated.
        patience: seconds for which a request is repeated while the server is away or busy.

    Raises:
        ConfigurationError: no server is configured, or a value is invalid.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        project: str | None = None,
        timeout: float = 30.0,
        patience: float = PATIENCE,
    ) -> None:
        # Where a recording is kept does not matter here, and its setting may not be usable.
        readable = {name: text for name, text in os.environ.items() if name != "FP8SCOPE_DIR"}
        settings = settings_from(url=url, token=token, project=project, mode="online", environment=readable)
        if not settings.url or not settings.token:
            raise ConfigurationError(NO_SERVER)
        self._connection = Connection(replace(settings, read_timeout=timeout), patience)

    def __repr__(self) -> str:
        return f"<Client {self.url}>"

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()

    @property
    def url(self) -> str:
        """The address of the server."""
        return self._connection.url

    def project(self) -> dict[str, Any]:
        """The project of the token: slug, name, description, archived_at, margin and alpha."""
        return self._connection.json("/project")

    def runs(self, query: str = "", *, sort: str = "-created") -> "RunList":
        """The runs that a search finds, in the language of the page: `state:failed lr>1e-3`; newest first.

        `sort` is a column of the page, descending after a minus: -created, loss, verdict, config.lr.
        """
        return RunList(self._connection, {"q": query, "sort": sort})

    def run(self, id_or_name: str | uuid.UUID) -> StoredRun:
        """The run with an id, or the newest one with exactly this name.

        Raises:
            RunNotFoundError: the project has none.
        """
        text = str(id_or_name)
        try:
            return read_run(self._connection, str(uuid.UUID(text)))
        except ValueError:
            listed = RunList(self._connection, {"name": text, "q": "archived:all"})
            # Without a name the server lists every run.
            named = listed.first() if text else None
        if named is None:
            raise RunNotFoundError(
                f"The project has no run with the name or id {text!r}.", code="unknown_run"
            )
        return named

    def compare(self, a: str | uuid.UUID | StoredRun, b: str | uuid.UUID | StoredRun) -> RunPair:
        """The verdict, difference, interval and margin of two runs of which one is the other's baseline.

        Takes runs, ids or names. It is the verdict of the judged run's page: about all runs of both groups.
        """
        first, second = (run.id if isinstance(run, StoredRun) else self.run(run).id for run in (a, b))
        return RunPair.of(self._connection.json("/compare", {"a": first, "b": second}))

    def alerts(self, *, state: str = "open", severity: str = "", kind: str = "") -> Iterator[RunAlert]:
        """The project's alerts, newest first. `state` is open, acknowledged, muted, resolved or all."""
        query = {"state": state, "severity": severity, "kind": kind}
        return read_alerts(self._connection, "/alerts", query)

    def alert_page(
        self,
        *,
        run: str | uuid.UUID | StoredRun | None = None,
        state: str = "open",
        severity: str = "",
        kind: str = "",
        limit: int = 100,
        after: int | None = None,
    ) -> AlertPage:
        """A page of the alerts of the project, or of a run: at most `limit` (1 to 100), after `after`."""
        query = {"state": state, "severity": severity, "kind": kind, "limit": limit, "after": after}
        if run is not None:
            query["run"] = run.id if isinstance(run, StoredRun) else self.run(run).id
        return read_page(self._connection, query)

    def alert(self, alert: int) -> AlertDetails:
        """One alert with its evidence and history. Raises ClientError if the project has no such alert."""
        return read_details(self._connection, alert)

    def alert_table(self, alert: int) -> dict[str, Any]:
        """The data of an alert's chart: summary and columns, or `empty` with the reason why not."""
        return self._connection.json(f"/alerts/{alert}/figure", {"format": "json"})

    def figure(self, name: str, /, **query: Any) -> Any:
        """A figure of several runs as a plotly.graph_objects.Figure; see docs/api.md.

        Raises ClientError without plotly.
        """
        return figures.read_figure(self._connection, f"/figures/{name}", query)

    def fleet(self) -> dict[str, Any]:
        """The hours of all runs of the project, what was lost of them, and what FP8 saved."""
        return self._connection.json("/fleet")


@dataclass(frozen=True, kw_only=True)
class RunListPage:
    """A page of a search. `next` is the value of `after` for the following page; None on the last one."""

    runs: tuple[StoredRun, ...]
    total: int
    next: str | None


class RunList:
    """The runs of a search, which are read page after page while one goes through them."""

    def __init__(self, connection: Connection, query: dict[str, str]) -> None:
        self._connection = connection
        self._query = query

    def __repr__(self) -> str:
        return f"<RunList {self._query.get('q', '')!r}>"

    def __iter__(self) -> Iterator[StoredRun]:
        after: list[str] = []
        while True:
            rows, next_page = self._after(after)
            yield from rows_of(self._connection, rows)
            if next_page is None:
                return
            after = [next_page, *(str(row["id"]) for row in reversed(rows[:-1]))]

    def __len__(self) -> int:
        """The number of runs that match."""
        return int(self._page({"limit": 1})["total"])

    def page(self, limit: int = RUNS_A_PAGE, after: str | None = None) -> RunListPage:
        """At most `limit` (1 to 100) of them, after the run with the id `after`."""
        answer = self._page({"limit": limit, "after": after})
        runs = tuple(rows_of(self._connection, answer["runs"]))
        return RunListPage(runs=runs, total=int(answer["total"]), next=answer["next"])

    def first(self) -> StoredRun | None:
        """The first of them; None without any."""
        rows = rows_of(self._connection, self._page({"limit": 1})["runs"])
        return rows[0] if rows else None

    def _after(self, after: list[str]) -> tuple[list[dict[str, Any]], str | None]:
        """The page after the first of some runs that still exists, without the others of them."""
        candidates: list[str | None] = [*after] or [None]
        for run in candidates:
            try:
                answer = self._page({"after": run, "limit": RUNS_A_PAGE})
            except ClientError as error:
                if not error.is_about_the_question or run in (None, candidates[-1]):
                    raise
                continue
            seen = set(after)
            return [row for row in answer["runs"] if row["id"] not in seen], answer["next"]
        raise AssertionError("unreachable")

    def _page(self, part: dict[str, object]) -> dict[str, Any]:
        answer = self._connection.json("/runs", {**self._query, **part})
        if "next" not in answer:
            raise ClientError(OLDER)
        if answer["problems"]:
            # The pages say it and show what is left, which a program would take for the answer.
            raise ClientError(f"The search was not understood: {' '.join(answer['problems'])}", status=422)
        return answer

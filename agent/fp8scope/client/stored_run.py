"""A run on the server."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from fp8scope.client import figures, notebook
from fp8scope.client.alerts import RunAlert, read_alerts
from fp8scope.client.connection import ClientError, Connection
from fp8scope.client.fields import OLDER, number_of, read_object, read_objects, time_of
from fp8scope.client.history import RunHistory, StatisticMap, TensorHistograms
from fp8scope.client.media import StoredMedia, read_media
from fp8scope.client.reading import MAX_POINTS, read_every_step, read_histograms, read_map, read_series
from fp8scope.client.steering import GivenCommand, StoredStepNote
from fp8scope.client.tensors import RankedTensors, StoredTensor, TensorRank
from fp8scope.client.verdicts import EvaluatedScore, JudgedScore, RunVerdict

TENSORS_A_PAGE = 2_000


class StoredRun:
    """A run on the server. Attributes are those of the last reading; `refresh` reads them again.

    A method asks the server each time. All raise ClientError if it refuses, UnreachableError without answer.
    """

    def __init__(self, connection: Connection, row: Mapping[str, Any], *, is_whole: bool) -> None:
        self._connection = connection
        self._row = dict(row)
        self._is_whole = is_whole

    def __repr__(self) -> str:
        return f"<StoredRun {self.name!r} {self.state} {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredRun) and (self._connection.url, self.id) == (
            other._connection.url,
            other.id,
        )

    def __hash__(self) -> int:
        return hash((self._connection.url, self.id))

    def refresh(self) -> "StoredRun":
        """Read the run again; returns it."""
        self._row = self._connection.json(f"/runs/{self.id}")
        self._is_whole = True
        return self

    def _field(self, name: str) -> Any:
        """A field of the run; a row of the list has not all of them."""
        if name not in self._row and not self._is_whole:
            self.refresh()
        if name not in self._row:
            raise ClientError(OLDER)
        return self._row[name]

    @property
    def id(self) -> str:
        """The id, as in the address of its page."""
        return str(self._field("id"))

    @property
    def name(self) -> str:
        """The name."""
        return str(self._field("name"))

    @property
    def url(self) -> str:
        """The address of its page."""
        return str(self._field("url"))

    @property
    def state(self) -> str:
        """running, silent, finished or failed."""
        return str(self._field("state"))

    @property
    def failure(self) -> str:
        """The traceback of a failed run; empty for others."""
        return str(self._field("failure"))

    @property
    def precision(self) -> str:
        """bf16, fp8, fp16, fp32 or unknown."""
        return str(self._field("precision"))

    @property
    def group(self) -> str:
        """The group of runs that differ only in their seed."""
        return str(self._field("group"))

    @property
    def baseline(self) -> str:
        """The group, or the id of the run, that this one is compared with."""
        return str(self._field("baseline"))

    @property
    def seed(self) -> int | None:
        """The seed."""
        seed: int | None = self._field("seed")
        return seed

    @property
    def tags(self) -> list[str]:
        """The tags."""
        return list(self._field("tags"))

    @property
    def config(self) -> dict[str, Any]:
        """The configuration, as the script has sent it."""
        return dict(self._field("config"))

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe of its FP8 layers."""
        return dict(self._field("recipe"))

    @property
    def summary(self) -> dict[str, Any]:
        """The results that the script has set for the run as a whole."""
        return dict(self._field("summary"))

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The starts of the training, as in docs/api.md: attempt, processes, hosts, first and last step."""
        return list(self._field("attempts"))

    @property
    def statistics(self) -> list[str]:
        """The statistics that are stored of its tensors."""
        return list(self._field("statistics"))

    @property
    def last_step(self) -> int | None:
        """The last stored step."""
        step: int | None = self._field("last_step")
        return step

    @property
    def total_steps(self) -> int | None:
        """The planned steps."""
        steps: int | None = self._field("total_steps")
        return steps

    @property
    def created_at(self) -> datetime:
        """The time at which it began."""
        return datetime.fromisoformat(self._field("created_at").replace("Z", "+00:00"))

    @property
    def finished_at(self) -> datetime | None:
        """The time at which it ended."""
        return time_of(self._field("finished_at"))

    @property
    def fields(self) -> dict[str, Any]:
        """Everything that the server has said of the run, as in docs/api.md."""
        return dict(self._row)

    def environment(self) -> dict[str, Any]:
        """The machine, the versions and the source."""
        return self._connection.json(f"/runs/{self.id}/environment")

    def scalars(self) -> dict[str, float | None]:
        """The logged scalars with their latest values."""
        listed = self._connection.json(f"/runs/{self.id}/scalars")["scalars"]
        return {scalar["name"]: number_of(scalar["last"]) for scalar in listed}

    def history(
        self,
        scalar: str = "",
        *,
        tensor: str = "",
        statistic: str = "amax",
        first: int | None = None,
        last: int | None = None,
        points: int | None = None,
        times: bool = False,
    ) -> RunHistory:
        """A scalar, or a statistic of a tensor, over the steps first..last (inclusive; all by default).

        Args:
            points: thin it to at most this many points (8 to 100,000), as the charts do: the smallest and the
                largest values stay. By default every stored step.
            times: also read the times at which the steps ended.
        """
        if bool(scalar) == bool(tensor):
            raise ClientError(
                'Name a scalar, history("loss"), or a tensor, history(tensor=..., statistic=...).'
            )
        series = {"scalar": scalar} if scalar else {"tensor": tensor, "statistic": statistic}
        if points is None:
            return read_every_step(self._connection, self.id, series, first, last, times=times)
        if not 8 <= points <= MAX_POINTS:
            raise ClientError(f"points must be from 8 to {MAX_POINTS:,}, not {points:,}; None is every step.")
        return read_series(self._connection, self.id, series, first, last, points, times=times)

    def heatmap(
        self,
        statistic: str = "amax",
        *,
        first: int | None = None,
        last: int | None = None,
        columns: int = 400,
    ) -> StatisticMap:
        """The largest value of a statistic by tensor and range of steps, in at most `columns` (to 2,000)."""
        return read_map(self._connection, self.id, statistic, first, last, columns)

    def histograms(
        self, tensor: str, *, first: int | None = None, last: int | None = None, limit: int = 64
    ) -> TensorHistograms:
        """The exponents of a tensor in sampled steps; of many, some that are evenly spread."""
        return read_histograms(self._connection, self.id, tensor, first, last, limit)

    def tensors(self, *, filter: str = "", role: str = "") -> list[StoredTensor]:
        """The tensors in the order of the model: those whose name contains `filter`, and with this role."""
        read: list[StoredTensor] = []
        while True:
            query = {"filter": filter, "role": role, "offset": len(read), "limit": TENSORS_A_PAGE}
            answer = self._connection.json(f"/runs/{self.id}/tensors", query)
            read += read_objects(StoredTensor, answer["tensors"])
            if not answer["tensors"] or len(read) >= answer["total"]:
                return read

    def ranking(
        self, statistic: str = "", *, sort: str = "onset", filter: str = "", limit: int = 100, offset: int = 0
    ) -> RankedTensors:
        """The tensors that left their range first, or are worst (`sort`: onset, now, ever, change).

        By default of the statistic that the page ranks. `offset` leaves out the first ones.
        """
        query = {"statistic": statistic, "sort": sort, "filter": filter, "limit": limit, "offset": offset}
        answer = self._connection.json(f"/runs/{self.id}/tensors/ranking", query)
        return read_object(RankedTensors, answer, tensors=read_objects(TensorRank, answer["tensors"]))

    def verdict(self) -> RunVerdict:
        """The verdict on the loss against the baseline, or why there is none."""
        return RunVerdict.of(self._connection.json(f"/runs/{self.id}/verdict"))

    def evaluations(self, *, step: int | None = None) -> list[EvaluatedScore]:
        """The evaluation scores with their intervals, newest first."""
        return list(read_objects(EvaluatedScore, self._evaluations(step)["scores"]))

    def score_verdicts(self, *, step: int | None = None) -> list[JudgedScore]:
        """The scores against those of the baseline: of each task the last, or those at `step`."""
        return [JudgedScore.of(row) for row in self._evaluations(step)["comparisons"]]

    def _evaluations(self, step: int | None) -> dict[str, Any]:
        return self._connection.json(f"/runs/{self.id}/evaluations", {"step": step})

    def alerts(self, *, state: str = "all", severity: str = "", kind: str = "") -> list[RunAlert]:
        """The alerts, newest first. `state` is open, acknowledged, muted, resolved or all."""
        query = {"state": state, "severity": severity, "kind": kind}
        return list(read_alerts(self._connection, f"/runs/{self.id}/alerts", query))

    def diagnosis(self) -> dict[str, Any]:
        """The diagnosis, as docs/api.md describes it; `current` says whether it is of the present data."""
        return self._connection.json(f"/runs/{self.id}/diagnosis")

    def readiness(self, **query: Any) -> dict[str, Any]:
        """The effect of another format on the tensors; docs/api.md has the parameters."""
        return self._connection.json(f"/runs/{self.id}/readiness", query)

    def course(self) -> list[dict[str, Any]]:
        """The course of the run, as its page tells it: step, earliest, until, title, detail and tone."""
        return list(self._connection.json(f"/runs/{self.id}/course")["onsets"])

    def ranks(self) -> list[dict[str, Any]]:
        """The ranks of the latest attempt: rank, hostname, last_step, lag, state, error and seen_at."""
        return list(self._connection.json(f"/runs/{self.id}/ranks")["ranks"])

    def efficiency(self) -> dict[str, Any]:
        """The shares of the phases in the time of a step, and the use of the machine."""
        return self._connection.json(f"/runs/{self.id}/efficiency")

    def console(self, *, rank: int = 0, search: str = "", limit: int = 1_000) -> list[dict[str, Any]]:
        """The last lines of the console log of a rank."""
        query = {"rank": rank, "q": search, "limit": limit}
        return list(self._connection.json(f"/runs/{self.id}/console", query)["lines"])

    def media(
        self, name: str = "", *, kind: str = "", first: int | None = None, last: int | None = None
    ) -> list[StoredMedia]:
        """The images, texts, tables and files: with this name, of a kind, at the steps first..last."""
        query = {"name": name or None, "kind": kind or None, "first": first, "last": last}
        return list(read_media(self._connection, f"/runs/{self.id}/media", query))

    def card(self) -> str:
        """A section for a model card, in Markdown: recipe, formats, verdict, hours, link."""
        return str(self._connection.json(f"/runs/{self.id}/card")["markdown"])

    def notes(self) -> list[StoredStepNote]:
        """The notes at its steps, by step."""
        return list(map(StoredStepNote.of, self.refresh().fields["step_notes"]))

    def write_note(self, step: int, text: str) -> StoredStepNote:
        """Pin a note to a step; the charts mark it. The token needs the scope *write runs*."""
        return StoredStepNote.of(
            self._connection.post(f"/runs/{self.id}/step_notes", {"step": step, "text": text})
        )

    def accepted_commands(self) -> list[str]:
        """The kinds of commands that its processes accept now; none if it is over."""
        return [str(kind) for kind in self._history("accepts")]

    def commands(self) -> list[GivenCommand]:
        """The commands that were given, newest first, with their results."""
        return [GivenCommand.of(command) for command in self._history("commands")]

    def give_command(
        self, kind: str, arguments: Mapping[str, Any] | None = None, *, reason: str = ""
    ) -> GivenCommand:
        """Ask its processes to do something that the script allows; docs/control.md has the kinds.

        The token needs the scope *administer*.
        """
        sent = {"kind": kind, "arguments": dict(arguments or {}), "reason": reason}
        return GivenCommand.of(self._connection.post(f"/runs/{self.id}/commands", sent))

    def _history(self, part: str) -> list[Any]:
        """A list of its history. Raises ClientError from a server that is older."""
        answer = self._connection.json(f"/runs/{self.id}/history")
        if part not in answer:
            raise ClientError(OLDER)
        return list(answer[part])

    def figures(self) -> list[str]:
        """The names of its figures."""
        return list(self._connection.json(f"/runs/{self.id}/figures")["figures"])

    def figure(self, name: str, /, **query: Any) -> Any:
        """A figure of its page as a plotly.graph_objects.Figure; see docs/api.md for the parameters.

        A name that is no figure is that of a scalar. Raises ClientError without plotly.
        """
        chosen, parameters = (name, query) if name in self.figures() else ("scalar", {"name": name, **query})
        return figures.read_figure(self._connection, f"/runs/{self.id}/figures/{chosen}", parameters)

    def figure_table(self, name: str, /, **query: Any) -> dict[str, Any]:
        """The data of a figure: summary, and columns with name, unit and values."""
        asked = {**query, "format": "json"}
        return self._connection.json(f"/runs/{self.id}/figures/{name}", asked)

    def _repr_html_(self) -> str:
        """The run in a notebook: its facts, its verdict and its loss as a small line. It loads nothing."""
        try:
            verdict: RunVerdict | None = self.verdict()
            line = self.history("loss", points=notebook.POINTS)
        except ClientError:
            # A notebook shows what it has read before, also without the server.
            return notebook.run_html(self._row, None, None)
        return notebook.run_html(self._row, verdict, line)


def read_run(connection: Connection, run: str) -> StoredRun:
    """The run with an id."""
    return StoredRun(connection, connection.json(f"/runs/{run}"), is_whole=True)


def rows_of(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> list[StoredRun]:
    """The runs of a page of the list."""
    return [StoredRun(connection, row, is_whole=False) for row in rows]

"""Tools about the project and its runs."""

from collections import Counter
from datetime import datetime
from typing import Any, Final

from pydantic import Field

from fp8scope.client import Client, RunVerdict, StoredRun
from fp8scope.client.fields import number_of
from fp8scope.mcp_server.answers import (
    AnswerPart,
    LossVerdict,
    ScoreVerdict,
    ToolAnswer,
    Unit,
    Verdict,
    project_link,
    run_link,
    score_of,
    verdict_of,
    verdict_sentence,
    words_of,
)
from fp8scope.mcp_server.run_data import (
    Interval,
    Number,
    RunDocument,
    RunName,
    RunText,
    ServerText,
    bounded,
)
from fp8scope.mcp_server.tool import Arguments, McpTool, OfRun

MAX_RUNS: Final = 50
MAX_SCORES: Final = 50
MAX_ATTEMPTS: Final = 20
MAX_ONSETS: Final = 100
DOCUMENTS: Final = ("config", "recipe", "summary")
SEARCH: Final = (
    "A search in the language of the page, such as 'precision:fp8 state:failed lr>1e-3'; empty: all."
)


class NoArguments(Arguments):
    """No arguments."""


class ProjectAnswer(ToolAnswer):
    """The project that the token belongs to."""

    slug: str
    name: RunName
    description: RunText
    archived_at: datetime | None
    margin: Number = Field(description="Relative difference of the loss that counts as none.")
    alpha: Number = Field(description="Probability of a false alarm over a whole run.")
    runs: int = Field(description="The runs that are not archived.")

    def sentence(self) -> str:
        return f"One project with {self.runs:,} runs; margin {self.margin}, alpha {self.alpha}."


def list_projects(client: Client, asked: NoArguments) -> ProjectAnswer:
    """The project of this connection. A token belongs to one project; `fp8scope mcp --project NAME` serves
    another one."""
    project = client.project()
    page = client.runs().page(1)
    links = [project_link(run, "Runs of the project", "") for run in page.runs]
    return ProjectAnswer.model_validate({**project, "runs": page.total, "links": links})


class RunsAsked(Arguments):
    query: str = Field("", max_length=500, description=SEARCH)
    sort: str = Field(
        "-created",
        max_length=200,
        description="A column, descending after a minus: -created, loss, config.lr.",
    )
    limit: int = Field(20, ge=1, le=MAX_RUNS)
    after: str = Field("", max_length=64, description="`next` of the page before; empty for the first page.")


class RunPart(AnswerPart):
    """A run of the list. The verdict is that of its page, in short."""

    id: str
    name: RunName
    state: str = Field(description="running, silent, finished or failed.")
    precision: RunName
    group: RunName
    baseline: RunName
    seed: int | None
    tags: list[RunName]
    last_step: int | None
    total_steps: int | None
    loss: Number = Field(description="The latest loss, in the unit of the script.")
    open_alerts: int
    created_at: datetime
    finished_at: datetime | None
    verdict: Verdict
    words: str
    unit: Unit = Field(description="Of delta, interval and own.")
    delta: Number
    interval: Interval | None
    own: Number
    url: str


class RunPageAnswer(ToolAnswer):
    """A page of runs. `next` is null on the last page."""

    total: int
    next: str | None
    runs: list[RunPart]

    def sentence(self) -> str:
        verdicts = Counter(run.words for run in self.runs if run.verdict)
        said = "".join(f" {count} {words}." for words, count in verdicts.most_common())
        return f"{len(self.runs)} of {self.total:,} runs.{said}"


def list_runs(client: Client, asked: RunsAsked) -> RunPageAnswer:
    """Search the runs of the project, in pages. Each has its state, its latest loss and its verdict in short;
    show_run has the whole of it."""
    page = client.runs(asked.query, sort=asked.sort).page(asked.limit, asked.after or None)
    links = [project_link(page.runs[0], "Runs of the project", "")] if page.runs else []
    listed = [_listed(run) for run in page.runs]
    return RunPageAnswer(total=page.total, next=page.next, runs=listed, links=links)


def _listed(run: StoredRun) -> RunPart:
    verdict = RunVerdict.of(run.fields["verdict"])
    short = {name: getattr(verdict, name) for name in ("verdict", "unit", "delta", "interval", "own")}
    loss = number_of(run.fields["loss"])
    return RunPart.model_validate({**run.fields, **short, "words": words_of(verdict.verdict), "loss": loss})


class AttemptPart(AnswerPart):
    """A start of the training."""

    attempt: int
    processes: int
    hosts: list[RunName] | int
    first_step: int | None
    last_step: int | None
    started_at: datetime | None
    seen_at: datetime | None


class RunAnswer(ToolAnswer):
    """A run with its verdict."""

    id: str
    name: RunName
    state: str = Field(description="running, silent, finished or failed.")
    failure: RunText
    precision: RunName
    group: RunName
    baseline: RunName
    parent: RunName
    relation: RunName
    seed: int | None
    tags: list[RunName]
    last_step: int | None
    total_steps: int | None
    created_at: datetime
    heartbeat_at: datetime | None
    finished_at: datetime | None
    rows_stored: int
    rows_dropped: int = Field(description="Steps that the agent could not keep: lost.")
    config: RunDocument
    recipe: RunDocument
    summary: RunDocument
    statistics: list[RunName] = Field(description="Statistics of tensors that are stored, for get_series.")
    attempts: list[AttemptPart]
    step_notes: int = Field(description="The number of notes; list_notes has them.")
    open_alerts: int
    verdict: LossVerdict
    scores: list[ScoreVerdict] = Field(
        description="Evaluation scores against the baseline's, of each task the last."
    )
    scores_verdict: Verdict = Field(description="One verdict over the tasks of the last compared step.")
    scores_explanation: ServerText

    def sentence(self) -> str:
        step = "no steps yet" if self.last_step is None else f"step {self.last_step:,}"
        scores = f" Scores: {words_of(self.scores_verdict)}." if self.scores_verdict else ""
        return (
            f"The run is {self.state}, {step}. {verdict_sentence(self.verdict)}{scores} "
            f"{self.open_alerts} open alerts."
        )


def show_run(client: Client, asked: OfRun) -> RunAnswer:
    """One run: state, configuration, summary, and its verdict against the baseline with interval, the reason,
    what was not judged and what is missing. 'cannot tell' is an answer."""
    run = client.run(asked.run).refresh()
    fields: dict[str, Any] = run.fields
    left_out = []
    documents = {}
    for name in DOCUMENTS:
        documents[name], is_cut = bounded(fields[name])
        if is_cut:
            left_out.append(f"{name}: the page with the configuration has all of it.")
    scores = run.score_verdicts()
    if len(scores) > MAX_SCORES:
        left_out.append(f"{len(scores) - MAX_SCORES} scores: get_evaluations has them.")
    summary = fields["evaluations_summary"] or {}
    return RunAnswer.model_validate(
        {
            **fields,
            **documents,
            "attempts": fields["attempts"][-MAX_ATTEMPTS:],
            "step_notes": len(fields["step_notes"]),
            "open_alerts": client.alert_page(run=run, limit=1).total,
            "verdict": verdict_of(run.verdict()),
            "scores": [score_of(score) for score in scores[:MAX_SCORES]],
            "scores_verdict": summary.get("verdict", ""),
            "scores_explanation": summary.get("explanation", ""),
            "links": [run_link(run), run_link(run, "configuration")],
            "left_out": left_out,
        }
    )


class OnsetPart(AnswerPart):
    """Something that happened: it began between `earliest` and `step`; `until` is the last of several."""

    step: int
    earliest: int
    until: int | None
    title: ServerText
    detail: ServerText
    tone: str


class CourseAnswer(ToolAnswer):
    """Course of a run, by step."""

    onsets: list[OnsetPart]

    def sentence(self) -> str:
        if not self.onsets:
            return "Nothing happened that the page tells."
        return f"{len(self.onsets)} things happened, the first at step {self.onsets[0].step:,}."


def get_course(client: Client, asked: OfRun) -> CourseAnswer:
    """Tell what happened in a run step by step, as its page does: when loss, tensors or scales changed."""
    run = client.run(asked.run)
    onsets = run.course()
    left_out = [] if len(onsets) <= MAX_ONSETS else ["Later ones: the page has them."]
    return CourseAnswer.model_validate(
        {"onsets": onsets[:MAX_ONSETS], "links": [run_link(run)], "left_out": left_out}
    )


TOOLS: Final = (
    McpTool(call=list_projects, title="The project"),
    McpTool(call=list_runs, title="Search runs"),
    McpTool(call=show_run, title="Show a run and its verdict"),
    McpTool(call=get_course, title="What happened in a run"),
)

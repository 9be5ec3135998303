"""Tools that compare runs: verdicts, configurations, evaluation scores, and the diagnosis."""

from typing import Final

from pydantic import Field

from fp8scope.client import Client, RunPair, StoredRun
from fp8scope.mcp_server.answers import (
    AnswerPart,
    Link,
    LossVerdict,
    ScoreVerdict,
    ToolAnswer,
    project_link,
    score_of,
    verdict_of,
    verdict_sentence,
)
from fp8scope.mcp_server.run_data import Interval, Number, RunDocument, RunName, RunText, ServerText, bounded
from fp8scope.mcp_server.tool import Arguments, McpTool, OfRun

MAX_SCORES: Final = 200
MAX_ENTRIES: Final = 200
MAX_FINDINGS: Final = 50


class TwoRuns(Arguments):
    a: str = Field(min_length=1, max_length=512, description="The id or the exact name of a run.")
    b: str = Field(
        min_length=1, max_length=512, description="Another run: one of the two is the other's baseline."
    )


class NamedRun(AnswerPart):
    id: str
    name: RunName


class ComparisonAnswer(ToolAnswer):
    """The verdict of the judged run: about all runs of both groups. `reason` says why there is none."""

    a: NamedRun
    b: NamedRun
    judged: str = Field(description="The id of the run whose verdict it is; empty without one.")
    reason: ServerText
    verdict: LossVerdict | None
    scores: list[ScoreVerdict]
    costs: ServerText = Field(description="Speed, memory and tokens against the baseline, in words.")
    quantities: RunDocument = Field(description="The numbers of costs.")
    differing_entries: int = Field(description="Entries of the configurations that differ.")

    def sentence(self) -> str:
        if self.verdict is None:
            return "No verdict: see reason."
        return (
            f"{verdict_sentence(self.verdict)} {self.differing_entries} entries of the configurations differ."
        )


def compare_runs(client: Client, asked: TwoRuns) -> ComparisonAnswer:
    """Compare two runs of which one is the other's baseline, or one of its seeds: verdict, difference,
    interval, margin, seeds, scores, and costs such as speed and memory. Between other runs there is no
    verdict."""
    first, second = client.run(asked.a), client.run(asked.b)
    pair = client.compare(first, second)
    quantities, is_cut = bounded(pair.quantities)
    return ComparisonAnswer(
        a=_named(pair.a),
        b=_named(pair.b),
        judged=pair.judged,
        reason=pair.reason,
        verdict=None if pair.verdict is None else verdict_of(pair.verdict),
        scores=[score_of(score) for score in pair.evaluations[:MAX_SCORES]],
        costs=pair.costs,
        quantities=quantities,
        differing_entries=len(pair.configuration),
        links=[_compare_link(first, second)],
        left_out=["quantities: the page has all of them."] if is_cut else [],
    )


class DifferencesAsked(TwoRuns):
    limit: int = Field(100, ge=1, le=MAX_ENTRIES)
    offset: int = Field(0, ge=0, le=100_000)


class DifferingEntry(AnswerPart):
    """An entry that differs, as text; null where a run has none."""

    key: RunName
    a: RunText | None
    b: RunText | None


class DifferencesAnswer(ToolAnswer):
    """Entries in which two configurations differ. `next_offset` is null on the last page."""

    a: NamedRun
    b: NamedRun
    total: int
    next_offset: int | None
    entries: list[DifferingEntry]

    def sentence(self) -> str:
        return f"{len(self.entries)} of {self.total:,} entries that differ."


def compare_configurations(client: Client, asked: DifferencesAsked) -> DifferencesAnswer:
    """The entries in which two configurations differ: settings, recipe, environment and source."""
    first, second = client.run(asked.a), client.run(asked.b)
    pair: RunPair = client.compare(first, second)
    end = asked.offset + asked.limit
    return DifferencesAnswer(
        a=_named(pair.a),
        b=_named(pair.b),
        total=len(pair.configuration),
        next_offset=end if end < len(pair.configuration) else None,
        entries=[DifferingEntry.model_validate(entry) for entry in pair.configuration[asked.offset : end]],
        links=[_compare_link(first, second)],
    )


def _named(run: tuple[str, str]) -> NamedRun:
    return NamedRun(id=run[0], name=run[1])


def _compare_link(first: StoredRun, second: StoredRun) -> Link:
    return project_link(first, "The two runs compared", f"compare/?runs={first.id}&runs={second.id}")


class EvaluationsAsked(OfRun):
    step: int | None = Field(
        None, ge=0, le=2**62, description="A checkpoint; by default the newest of each task."
    )
    limit: int = Field(100, ge=1, le=MAX_SCORES)


class ScorePart(AnswerPart):
    """A score of the run itself; its interval is over the items, null where none is reliable."""

    name: RunName
    metric: RunName
    step: int
    kind: str
    higher_is_better: bool
    score: Number
    interval: Interval | None
    items: int
    precision: RunName | None


class EvaluationsAnswer(ToolAnswer):
    """Scores of a run, newest first, and the verdicts on them against the baseline."""

    scores: list[ScorePart]
    verdicts: list[ScoreVerdict]

    def sentence(self) -> str:
        said = "; ".join(sorted({score.words for score in self.verdicts})) or "none against a baseline"
        return f"{len(self.scores)} scores, {len(self.verdicts)} verdicts: {said}."


def get_evaluations(client: Client, asked: EvaluationsAsked) -> EvaluationsAnswer:
    """Evaluation scores of a run with their intervals, and the verdicts on them against the baseline."""
    run = client.run(asked.run)
    scores, judged = run.evaluations(step=asked.step), run.score_verdicts(step=asked.step)
    most = max(len(scores), len(judged))
    return EvaluationsAnswer(
        scores=[ScorePart.model_validate(score) for score in scores[: asked.limit]],
        verdicts=[score_of(score) for score in judged[: asked.limit]],
        links=[project_link(run, "Evaluations of the run", f"evaluations/?run={run.id}")],
        left_out=[f"{most - asked.limit} scores: name a step, or a larger limit."]
        if most > asked.limit
        else [],
    )


class FindingLink(AnswerPart):
    kind: str
    label: RunName
    parts: dict[str, RunName]


class FindingPart(AnswerPart):
    """The result of one step of the diagnosis. It began between the steps `earliest` and `onset`."""

    step: str
    outcome: str
    sentence: ServerText
    cause: str
    onset: int | None
    earliest: int | None
    tensors: list[RunName]
    suggestion: ServerText
    links: list[FindingLink]


class DiagnosisAnswer(ToolAnswer):
    """The suspected cause. `current` is false while a newer diagnosis is being made: ask again."""

    current: bool
    explanation: ServerText | None
    outcome: str
    cause: str
    cause_name: ServerText
    onset: int | None
    suggestion: ServerText
    decided_by: str
    method_version: int | None
    findings: list[FindingPart]

    def sentence(self) -> str:
        if self.explanation is None:
            return "No diagnosis has been made yet. One has been started: ask again."
        state = "" if self.current else " It is of older data: ask again for the present ones."
        at = "" if self.onset is None else f" Onset: step {self.onset:,}."
        return f"Outcome: {self.outcome or 'none'}; cause: {self.cause or 'none named'}.{at}{state}"


def get_diagnosis(client: Client, asked: OfRun) -> DiagnosisAnswer:
    """Diagnose a run in trouble: the suspected cause, its onset, each step of the reasoning with evidence,
    and what to try. The outcome may be that the cause cannot be told."""
    run = client.run(asked.run)
    read = run.diagnosis()
    findings = read.get("findings", [])
    return DiagnosisAnswer.model_validate(
        {
            **read,
            "explanation": read.get("sentence"),
            "findings": findings[:MAX_FINDINGS],
            "links": [Link(title="Diagnosis", url=f"{run.url}diagnosis/")],
        }
    )


TOOLS: Final = (
    McpTool(call=compare_runs, title="Compare two runs"),
    McpTool(call=compare_configurations, title="Differences of two configurations"),
    McpTool(call=get_evaluations, title="Evaluation scores and their verdicts"),
    McpTool(call=get_diagnosis, title="Diagnosis of a run"),
)

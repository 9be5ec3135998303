"""Parts of the tools' answers: links, verdicts and seeds. Their schemas are what a client reads of a tool."""

from collections.abc import Mapping
from typing import Annotated, Any, Final
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field

from fp8scope.client import JudgedScore, RunVerdict, SeedDifference, StoredRun
from fp8scope.mcp_server.run_data import Interval, Number, RunName, ServerText

MAX_MEMBERS: Final = 50
MAX_SENTENCES: Final = 50
WORDS: Final[Mapping[str, str]] = {
    "equivalent": "equivalent to the baseline, within the margin",
    "worse": "worse than the baseline",
    "better": "better than the baseline",
    "cannot_tell": "cannot tell",
    "pending": "good so far, but the run is not over",
    "incomplete": "good so far, but the run ended early",
    "": "no verdict",
}
# No literals: a newer server may have further ones.
Verdict = Annotated[
    str,
    Field(description="equivalent, worse, better, cannot_tell, pending, incomplete, or empty without one."),
]
Unit = Annotated[str, Field(description="relative (0.01 is 1 % of the baseline's loss) or nats.")]


class AnswerPart(BaseModel):
    """A part of an answer. It is read from the client's objects by the names of their attributes."""

    model_config = ConfigDict(from_attributes=True, extra="ignore")


class Link(AnswerPart):
    """A page that shows the evidence, for people."""

    title: str
    url: str


class ToolAnswer(AnswerPart):
    """The structured content of a tool."""

    links: list[Link] = Field(default=[], description="Pages that show the evidence: give them to people.")
    left_out: list[str] = Field(default=[], description="What was left out, and how to read it.")

    def sentence(self) -> str:
        """The answer in one short text, without any text of a run."""
        raise NotImplementedError


class Seed(AnswerPart):
    """A run of a judged seed group with its own difference; null where its loss is not finite."""

    run: str
    name: RunName
    seed: int | None
    difference: Number
    left: bool = Field(description="It left its group.")


class LossVerdict(AnswerPart):
    """The verdict on the loss against the baseline. `cannot_tell` does not mean 'no difference'.

    Differences are in `unit`: `relative` (fractions of the baseline's loss, 0.01 is 1 %) or `nats`.
    """

    verdict: Verdict
    words: str = Field(description="The verdict in words.")
    measured: str = Field(description="The verdict of the statistics on what is stored.")
    label: ServerText
    explanation: ServerText
    final: bool = Field(description="It covers the whole run.")
    unit: Unit
    delta: Number = Field(
        description="The difference to the baseline, of the seed group if it has several runs."
    )
    interval: Interval | None = Field(description="The interval of delta.")
    tolerance: Number = Field(description="The largest difference that counts as none.")
    margin: Number = Field(description="The margin that was asked for.")
    smallest_detectable: Number = Field(description="The smallest difference that would have been found.")
    own: Number = Field(description="This run's own difference.")
    left: bool = Field(description="This run left its seed group.")
    baseline: RunName
    baseline_runs: int
    members: list[Seed]
    coverage: ServerText
    not_judged: list[ServerText] = Field(description="What the verdict does not cover. Repeat it.")
    warnings: list[ServerText]


class ScoreVerdict(AnswerPart):
    """The verdict on an evaluation score against the baseline's; differences are in the unit of the score."""

    name: RunName
    metric: RunName
    step: int
    higher_is_better: bool
    verdict: Verdict
    words: str
    measured: str
    label: ServerText
    explanation: ServerText
    score: Number
    baseline_score: Number
    difference: Number
    interval: Interval | None = Field(description="The interval of the difference.")
    margin: Number
    smallest_detectable: Number
    items: int
    members: list[Seed]
    not_judged: list[ServerText]
    warnings: list[ServerText]


def verdict_of(verdict: RunVerdict) -> LossVerdict:
    """A verdict of the client as a part of an answer."""
    return LossVerdict.model_validate(_worded(verdict))


def score_of(score: JudgedScore) -> ScoreVerdict:
    """A judged score of the client as a part of an answer."""
    return ScoreVerdict.model_validate(_worded(score))


def _worded(judged: RunVerdict | JudgedScore) -> dict[str, Any]:
    fields = dict(vars(judged))
    fields["words"] = words_of(judged.verdict)
    fields["members"] = [_seed(member) for member in judged.members[:MAX_MEMBERS]]
    for name in ("not_judged", "warnings"):
        fields[name] = list(fields[name][:MAX_SENTENCES])
    return fields


def _seed(member: SeedDifference) -> dict[str, Any]:
    return dict(vars(member))


def words_of(verdict: str) -> str:
    """A verdict in words: `cannot tell` for cannot_tell."""
    return WORDS.get(verdict, "no verdict")


def difference_in_words(value: Number, unit: str) -> str:
    """A difference with its unit: `+0.123 %` or `+0.0012 nats`."""
    if value is None or isinstance(value, str):
        return "unknown" if value is None else value
    return f"{100.0 * value:+.3g} %" if unit == "relative" else f"{value:+.3g} {unit}".rstrip()


def verdict_sentence(verdict: LossVerdict) -> str:
    """A verdict in one sentence, with its difference and interval."""
    text = f"Verdict: {verdict.words}."
    if verdict.delta is not None:
        text += f" Difference {difference_in_words(verdict.delta, verdict.unit)}"
        if verdict.interval is not None:
            low, high = (difference_in_words(end, verdict.unit) for end in verdict.interval)
            text += f", interval {low} to {high}"
        text += "."
    if verdict.not_judged:
        text += f" Not judged: {len(verdict.not_judged)} points, see not_judged."
    return text


def run_link(run: StoredRun, tab: str = "", **query: str) -> Link:
    """The page of a run, or one of its tabs."""
    parameters = {"tab": tab, **query} if tab else query
    text = "&".join(f"{name}={quote(value, safe='.')}" for name, value in parameters.items())
    title = f"Run, {tab}" if tab else "Run"
    return Link(title=title, url=f"{run.url}?{text}" if text else run.url)


def project_link(run: StoredRun, title: str, path: str) -> Link:
    """A page of the run's project."""
    return Link(title=title, url=f"{run.url.partition('/runs/')[0]}/{path}")

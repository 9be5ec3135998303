"""Tools about values over steps, and about console lines."""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from pydantic import Field

from fp8scope.client import Client
from fp8scope.mcp_server.answers import AnswerPart, ToolAnswer, run_link
from fp8scope.mcp_server.run_data import Number, RunName, RunText, ServerText
from fp8scope.mcp_server.tool import McpTool, OfRun

MAX_POINTS: Final = 2_000
MAX_SCALARS: Final = 500
MAX_LINES: Final = 200
UNITS: Final = (
    (r"_seconds$|^time_", "s"),
    (r"_bytes$|^memory_", "bytes"),
    (
        r"^(saturation|overflow|underflow|subnormal|nonfinite|saturated_block)_rate$",
        "share of the elements, 0 to 1",
    ),
    (r"_watts$", "W"),
    (r"_mhz$", "MHz"),
    (r"_per_second$", "1/s"),
    (r"^tokens$", "tokens"),
    (r"^(saturated|underflow|subnormal|nonfinite|numel)$", "elements"),
    (r"sqnr", "dB"),
)
AS_LOGGED: Final = "as the script logs it"


def unit_of(name: str) -> str:
    """The unit of a scalar or a statistic by its name; that of a script's own values is unknown."""
    return next((unit for pattern, unit in UNITS if re.search(pattern, name)), AS_LOGGED)


class ScalarsAsked(OfRun):
    filter: str = Field("", max_length=200, description="A part of the names.")
    limit: int = Field(200, ge=1, le=MAX_SCALARS)
    offset: int = Field(0, ge=0, le=100_000)


class ScalarPart(AnswerPart):
    name: RunName
    last: Number
    unit: str


class ScalarsAnswer(ToolAnswer):
    """Logged scalars with their latest values. `next_offset` is null on the last page."""

    total: int
    next_offset: int | None
    scalars: list[ScalarPart]

    def sentence(self) -> str:
        return f"{len(self.scalars)} of {self.total:,} scalars."


def list_scalars(client: Client, asked: ScalarsAsked) -> ScalarsAnswer:
    """The scalars that a run has logged, such as loss and grad_norm, with their latest values."""
    run = client.run(asked.run)
    chosen = [(name, last) for name, last in run.scalars().items() if asked.filter in name]
    end = asked.offset + asked.limit
    return ScalarsAnswer(
        total=len(chosen),
        next_offset=end if end < len(chosen) else None,
        scalars=[
            ScalarPart(name=name, last=last, unit=unit_of(name)) for name, last in chosen[asked.offset : end]
        ],
        links=[run_link(run, "charts")],
    )


class SeriesAsked(OfRun):
    scalar: str = Field("", max_length=512, description="A scalar, such as loss. Name it, or a tensor.")
    tensor: str = Field("", max_length=512, description="A tensor, such as blocks.0.mlp.up.input.")
    statistic: str = Field("amax", max_length=64, description="Of the tensor; show_run lists those stored.")
    first: int | None = Field(None, ge=0, le=2**62, description="The first step, inclusive.")
    last: int | None = Field(None, ge=0, le=2**62, description="The last step, inclusive.")
    points: int = Field(200, ge=8, le=MAX_POINTS, description="The most points of the answer.")


class SeriesAnswer(ToolAnswer):
    """Values over steps. `thinned`: steps are missing, because there are more than `points`.

    The smallest and the largest value of each part stay, so that no spike is lost; `how` says more.
    """

    name: RunName
    unit: str
    thinned: bool
    how: ServerText
    steps: list[int]
    values: list[Number] = Field(description="A value for each of steps, exact.")

    def sentence(self) -> str:
        if not self.steps:
            return "No values in this range."
        thinned = ", thinned" if self.thinned else ", every stored step"
        return (
            f"{len(self.steps):,} values, steps {self.steps[0]:,} to {self.steps[-1]:,}{thinned}. "
            f"The last is {self.values[-1]} ({self.unit})."
        )


def get_series(client: Client, asked: SeriesAsked) -> SeriesAnswer:
    """A scalar, or a statistic of a tensor, over the steps of a run, in at most `points` points."""
    run = client.run(asked.run)
    history = run.history(
        asked.scalar,
        tensor=asked.tensor,
        statistic=asked.statistic,
        first=asked.first,
        last=asked.last,
        points=asked.points,
    )
    link = run_link(run, "charts") if asked.scalar else run_link(run, "tensors", tensor=asked.tensor)
    return SeriesAnswer(
        name=history.name,
        unit=unit_of(asked.scalar or asked.statistic),
        thinned=history.thinned,
        how=history.how,
        steps=history.steps.tolist(),
        values=_numbers(history.values.tolist()),
        links=[link],
    )


def _numbers(values: Sequence[float]) -> list[Number]:
    return list(values)


class ConsoleAsked(OfRun):
    rank: int = Field(0, ge=0, le=2**31 - 1)
    search: str = Field("", max_length=200, description="A part of the text, whatever its capitals.")
    limit: int = Field(50, ge=1, le=MAX_LINES)


class ConsoleLinePart(AnswerPart):
    time: datetime
    step: int
    stream: str
    text: RunText


class ConsoleAnswer(ToolAnswer):
    """The newest lines of the console log of a rank, oldest first."""

    lines: list[ConsoleLinePart]

    def sentence(self) -> str:
        return f"{len(self.lines)} lines of the console log: what the training wrote, which is data."


def get_console(client: Client, asked: ConsoleAsked) -> ConsoleAnswer:
    """The newest console lines of a rank of a run: what the training script wrote. They are data."""
    run = client.run(asked.run)
    lines = run.console(rank=asked.rank, search=asked.search, limit=asked.limit)
    return ConsoleAnswer(
        lines=[ConsoleLinePart.model_validate(line) for line in lines], links=[run_link(run, "console")]
    )


TOOLS: Final = (
    McpTool(call=list_scalars, title="Logged scalars"),
    McpTool(call=get_series, title="Values over steps"),
    McpTool(call=get_console, title="Console lines"),
)

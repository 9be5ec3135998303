"""Tools about tensors."""

from typing import Final, Literal

from pydantic import Field

from fp8scope.client import Client
from fp8scope.mcp_server.answers import AnswerPart, ToolAnswer, run_link
from fp8scope.mcp_server.run_data import Number, RunName
from fp8scope.mcp_server.tool import McpTool, OfRun
from fp8scope.mcp_server.tools.series import unit_of

MAX_TENSORS: Final = 100


class RankingAsked(OfRun):
    statistic: str = Field("", max_length=64, description="By default that of the page; show_run lists them.")
    sort: Literal["onset", "now", "ever", "change"] = Field(
        "onset", description="First to leave its range, or the largest now, ever, or the largest change."
    )
    filter: str = Field("", max_length=200, description="A part of the names.")
    limit: int = Field(20, ge=1, le=MAX_TENSORS)
    offset: int = Field(0, ge=0, le=100_000)


class TensorPart(AnswerPart):
    """A tensor. It left its range between the steps `earliest` and `onset`; both are null if it did not."""

    index: int
    name: RunName
    onset: int | None
    earliest: int | None
    now: Number = Field(description="The largest value of the last 100 steps.")
    ever: Number = Field(description="The largest value of the run.")
    before: Number = Field(description="The median of its beginning.")
    after: Number = Field(description="The median of its end.")
    change: Number = Field(description="log2 of after / before.")


class RankingAnswer(ToolAnswer):
    """Tensors in the order of the page. `next_offset` is null on the last page."""

    statistic: RunName
    unit: str
    limit: Number = Field(
        description="Above it a tensor is out of its range: a rate, or a change in powers of two."
    )
    total: int
    out_of_range: int
    still: int = Field(description="Left out, because their rate was 0 in every step.")
    next_offset: int | None
    tensors: list[TensorPart]

    def sentence(self) -> str:
        return (
            f"{self.out_of_range:,} of {self.total:,} tensors left their range. {len(self.tensors)} are "
            f"listed; {self.still:,} whose rate was always 0 are not."
        )


def rank_tensors(client: Client, asked: RankingAsked) -> RankingAnswer:
    """The tensors of a run that left the range of their format first, or are worst, with their onset."""
    run = client.run(asked.run)
    ranking = run.ranking(
        asked.statistic, sort=asked.sort, filter=asked.filter, limit=asked.limit, offset=asked.offset
    )
    end = asked.offset + len(ranking.tensors)
    is_last = len(ranking.tensors) < asked.limit
    return RankingAnswer.model_validate(
        {
            **vars(ranking),
            "unit": unit_of(ranking.statistic),
            "next_offset": None if is_last else end,
            "tensors": [TensorPart.model_validate(tensor) for tensor in ranking.tensors],
            "links": [run_link(run, "tensors")],
        }
    )


TOOLS: Final = (McpTool(call=rank_tensors, title="Tensors that left their range"),)

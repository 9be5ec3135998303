"""Tools about the training process: times, efficiency and ranks."""

from datetime import datetime
from typing import Final

from pydantic import Field

from fp8scope.client import Client
from fp8scope.mcp_server.answers import AnswerPart, ToolAnswer, run_link
from fp8scope.mcp_server.run_data import Number, RunName, RunText, ServerText
from fp8scope.mcp_server.tool import McpTool, OfRun

MAX_RANKS: Final = 100


class FigurePart(AnswerPart):
    """A figure beside the chart of step times: as the page writes it, and its number."""

    name: str
    title: ServerText
    value: ServerText
    amount: Number = Field(description="In SI units or bytes; null where the page has no number.")


class EfficiencyAnswer(ToolAnswer):
    """The phases of a step as shares of its time (0 to 1), and figures of the machine's use."""

    phases: dict[str, Number]
    figures: list[FigurePart]

    def sentence(self) -> str:
        if not self.phases:
            return "No step times are stored."
        name, share = max(
            self.phases.items(), key=lambda item: item[1] if isinstance(item[1], float) else 0.0
        )
        percent = f"{100.0 * share:.3g} %" if isinstance(share, float) else "unknown"
        return f"The largest phase is {name} with {percent} of a step; {len(self.figures)} figures."


def get_efficiency(client: Client, asked: OfRun) -> EfficiencyAnswer:
    """Step times of a run: the shares of waiting for data, forward, backward and optimizer, the throughput,
    the memory, and the use of the device."""
    run = client.run(asked.run)
    return EfficiencyAnswer.model_validate({**run.efficiency(), "links": [run_link(run, "efficiency")]})


class RankPart(AnswerPart):
    rank: int
    hostname: RunName
    last_step: int | None
    lag: int = Field(description="Steps behind the rank with the most.")
    state: str
    error: RunText
    seen_at: datetime | None


class RanksAnswer(ToolAnswer):
    """The ranks of the latest attempt."""

    ranks: list[RankPart]

    def sentence(self) -> str:
        behind = sum(rank.lag > 0 for rank in self.ranks)
        return f"{len(self.ranks)} ranks, {behind} of them behind."


def get_ranks(client: Client, asked: OfRun) -> RanksAnswer:
    """The ranks of a run's latest attempt: host, last step, lag, state and error of each."""
    run = client.run(asked.run)
    ranks = run.ranks()
    left_out = [f"{len(ranks) - MAX_RANKS} ranks: the page has them."] if len(ranks) > MAX_RANKS else []
    return RanksAnswer.model_validate(
        {"ranks": ranks[:MAX_RANKS], "links": [run_link(run, "ranks")], "left_out": left_out}
    )


TOOLS: Final = (
    McpTool(call=get_efficiency, title="Step times and efficiency"),
    McpTool(call=get_ranks, title="Ranks of a run"),
)

"""The tools, in the order in which a client lists them."""

from collections.abc import Sequence
from typing import Final

from fp8scope.mcp_server.tool import McpTool
from fp8scope.mcp_server.tools import alerts, comparisons, media, runs, series, steering, tensors, training

TOOLS: Final[Sequence[McpTool]] = (
    *runs.TOOLS,
    *comparisons.TOOLS,
    *alerts.TOOLS,
    *series.TOOLS,
    *tensors.TOOLS,
    *training.TOOLS,
    *media.TOOLS,
    *steering.TOOLS,
)

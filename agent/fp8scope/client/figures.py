"""Figures of the pages as objects of plotly, which is imported when one is asked for."""

from collections.abc import Mapping
from typing import Any

from fp8scope.client.connection import ClientError, Connection


def read_figure(connection: Connection, path: str, query: Mapping[str, Any]) -> Any:
    """The plotly.graph_objects.Figure at a path.

    Raises:
        ClientError: plotly is missing, or the figure has no data; the message is the page's.
    """
    try:
        from plotly import graph_objects
    except ImportError:
        raise ClientError("A figure needs plotly: pip install plotly, or use figure_table().") from None
    answer = connection.json(path, {**query, "format": "plotly"})
    if "figure" not in answer:
        raise ClientError(str(answer.get("empty") or "The figure has no data."))
    # The server may have another version of plotly.
    return graph_objects.Figure(answer["figure"], skip_invalid=True)

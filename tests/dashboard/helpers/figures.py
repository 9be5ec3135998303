"""Figures as a browser gets them: JSON that plotly.py has written."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
from dashboard.helpers.visitor import Visitor


def get(visitor: Visitor, rest: str, **query: str) -> dict[str, Any]:
    answer = visitor.client.get(visitor.address(rest), query)
    assert answer.status_code == 200 and answer["Content-Type"] == "application/json"
    return dict(json.loads(answer.content))


def values(data: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """What plotly.py writes: a list, or bytes in base64."""
    if isinstance(data, dict):
        return np.frombuffer(base64.b64decode(data["bdata"]), np.dtype(data["dtype"]))
    return np.array([np.nan if value is None else value for value in data], float)

"""Reads of a request of its project, so that a page and the chart that comes with it show one state.

They stay on the project's object. Each request has an object of its own, so nothing outlives the request.
"""

from __future__ import annotations

from typing import Any

from fp8scope_dashboard.accounts.models import Project


def reads_of(project: Project, kind: str) -> dict[Any, Any]:
    """Return the reads of this kind by their key; the caller adds to them."""
    kinds: dict[str, dict[Any, Any]] = project.__dict__.setdefault("_reads", {})
    return kinds.setdefault(kind, {})

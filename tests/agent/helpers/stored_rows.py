"""Answers of the reading API, as the server gives them."""

from __future__ import annotations

from typing import Any

RUN = "0b7f7a0e-9f6c-4a55-9c3a-2f1f2b8f3a11"


def verdict(**changed: Any) -> dict[str, Any]:
    """An answer of GET /runs/{run}/verdict."""
    return {
        "verdict": "worse", "measured": "worse", "label": "Worse than BF16",
        "explanation": "It is 1 % above.", "final": False, "unit": "relative", "delta": 0.01,
        "interval": [0.005, 0.015], "tolerance": 0.0025,
        "margin": 0.0025, "smallest_detectable": 0.004, "own": 0.01, "left": False, "baseline": "bf16",
        "baseline_runs": 3, "coverage": "All of it.", "not_judged": ["Only the first half."], "warnings": [],
        "members": [{"run": RUN, "name": "a", "seed": 1, "difference": None, "left": True, "new": 1}],
        **changed,
    }  # fmt: skip


def row(**changed: Any) -> dict[str, Any]:
    """A run of GET /runs."""
    return {
        "id": RUN, "name": "a run", "state": "running", "precision": "fp8", "recipe": {}, "recipe_name": "",
        "group": "g", "baseline": "bf16", "parent": "", "relation": "", "seed": 1, "tags": ["t"],
        "last_step": 7, "total_steps": None, "created_at": "2026-01-01T00:00:00Z",
        "heartbeat_at": "2026-01-01T00:00:00Z",
        "finished_at": None, "archived_at": None, "loss": "NaN", "verdict": verdict(), "open_alerts": 0,
        "url": "https://example.org/p/default/runs/1/", **changed,
    }  # fmt: skip

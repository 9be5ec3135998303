"""The page of a run shows how often plain tensors are read, if not at every step."""

from __future__ import annotations

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.visitors import Visitor

from fp8scope_dashboard.pages import glossary


def head(admin: Visitor, scalars: dict[str, float]) -> str:
    run = make_run(admin.project, "thinned")
    Recorder(run=run).rows(np.arange(3), {name: np.full(3, value) for name, value in scalars.items()})
    answer = admin.client.get(admin.address(f"runs/{run.id}/"))
    assert answer.status_code == 200
    return " ".join(answer.content.decode().split())


def test_it_works(admin: Visitor) -> None:
    assert "<dd>read every 4th step</dd>" in head(admin, {"loss": 1.0, "plain_tensors_every": 4.0})


@pytest.mark.parametrize("scalars", [{"loss": 1.0}, {"loss": 1.0, "plain_tensors_every": 1.0}])
def test_reading_every_step_is_not_mentioned(admin: Visitor, scalars: dict[str, float]) -> None:
    assert "Plain tensors" not in head(admin, scalars)


def test_the_scalar_is_explained() -> None:
    assert "only every few steps" in glossary.GLOSSARY["plain_tensors_every"].definition


def test_short_steps_are_explained(admin: Visitor) -> None:
    """Where only the loss is recorded in each step, the page says so."""
    page = head(admin, {"loss": 1.0, "measured_every": 50.0})
    assert "only the loss is recorded in each, the rest in every 50th" in page
    assert "Short steps" not in head(admin, {"loss": 1.0})

"""The sentence on the run page about tensors that have changed."""

from __future__ import annotations

from html import unescape

import numpy as np
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.visitors import Visitor

from fp8scope_dashboard.analysis.tensor_changes import changed_tensors
from fp8scope_dashboard.runs.models import Run

TENSORS = [f"blocks.{i}.input" for i in range(20)]


def record(visitor: Visitor, steps: int) -> Run:
    run = make_run(visitor.project, "watched")
    amax = np.exp(0.1 * np.random.default_rng(1).normal(size=(steps, len(TENSORS))))
    amax[3 * steps // 4 :, 3] *= 2.0
    amax[3 * steps // 4 :, 7] /= 2.0
    Recorder(run=run, tensors=TENSORS).rows(np.arange(1, steps + 1), {}, {"amax": amax}, rows_per_batch=100)
    return run


def sentence(visitor: Visitor, run: Run, statistic: str = "amax") -> str:
    answer = visitor.client.get(visitor.address(f"runs/{run.id}/changes"), {"statistic": statistic})
    assert answer.status_code == 200
    return unescape(answer.content.decode()).replace("\N{NARROW NO-BREAK SPACE}", " ")


def test_it_works(admin: Visitor) -> None:
    run = record(admin, 200)
    changes = changed_tensors(run.id, "amax")
    assert changes is not None and changes.tested == 20 and changes.certain == 2
    # A false claim now and then is what a false discovery rate allows.
    assert {change.index for change in changes.changed[:2]} == {3, 7} and len(changes.changed) <= 3
    text, claims = sentence(admin, run), len(changes.changed)
    assert f"{claims} of 20 tensors</strong> changed their amax since step 151" in text
    assert "(false discovery rate 5 %)" in text
    assert 'data-tensor="blocks.3.input"' in text and "↑" in text and "↓" in text
    page = admin.client.get(admin.address(f"runs/{run.id}/")).content.decode()
    assert f"runs/{run.id}/changes" in page


def test_too_little_or_unknown_says_nothing(admin: Visitor, stranger: Visitor) -> None:
    run = record(admin, 30)
    assert not sentence(admin, run).strip() and not sentence(admin, run, "nonsense").strip()
    empty = make_run(admin.project, "empty")
    assert not sentence(admin, empty).strip()
    assert stranger.client.get(f"/p/{admin.project.slug}/runs/{run.id}/changes").status_code == 404

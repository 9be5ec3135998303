"""An agent that does not know today's optional fields is served as before.

recorded_agent.json holds what an agent sent in a run of twelve steps with one FP8 layer, before parent,
relation, and the precision and margin of evaluations were added. Arrow bodies are in base64.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from contract.helpers.wire_client import ARROW, Answer, WireClient
from helpers.live_servers import Server

from fp8scope_dashboard.analysis.loss_comparisons import compare
from fp8scope_dashboard.analysis.score_comparisons import compare_evaluations
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.runs.models import Run, RunState
from fp8scope_dashboard.telemetry import queries

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded_agent.json").read_text())
ID = UUID(RECORDED["run"])


def replay(client: WireClient, request: dict[str, Any]) -> Answer:
    if "json" in request:
        return client.request(request["method"], request["path"], json=request["json"])
    body = base64.b64decode(request["arrow"])
    return client.request(request["method"], request["path"], body=body, headers={"Content-Type": ARROW})


@pytest.fixture
def client(server: Server) -> WireClient:
    return WireClient(server.url, server.token, run=ID)


def test_it_works(client: WireClient) -> None:
    answers = [replay(client, request) for request in RECORDED["requests"]]
    assert [answer.status for answer in answers] == [201, 200, *[201] * 7, 200, 201], answers
    run = Run.objects.get(pk=ID)
    assert (run.state, run.rows_stored, run.points_stored, run.agent_errors) == (
        RunState.FINISHED,
        12,
        441,
        0,
    )
    assert (run.parent, run.relation, run.seed, run.tags) == ("", "", 3, ["old"])
    assert queries.scalar(ID, "loss").steps.tolist() == list(range(1, 13))
    assert np.isfinite(queries.tensor_series(ID, 0, "amax").values).all()
    assert queries.histogram_count(ID) > 0
    evaluation = Evaluation.objects.get()
    assert (evaluation.precision, evaluation.margin, evaluation.items) == (None, None, [1.0, 0.0, 1.0, 1.0])


def test_messages_that_are_sent_again_are_duplicates(client: WireClient) -> None:
    for request in RECORDED["requests"]:
        replay(client, request)
    again = [replay(client, request) for request in RECORDED["requests"] if request["method"] == "POST"]
    assert {answer.status for answer in again} == {200}
    messages = [answer.json for answer in again if "status" in answer.json]
    assert len(messages) == 8 and all(message["status"] == "duplicate" for message in messages)


def test_the_run_is_compared_without_the_new_fields(client: WireClient) -> None:
    for request in RECORDED["requests"]:
        replay(client, request)
    Run.objects.create(project=Run.objects.get(pk=ID).project, name="bf16", group="bf16", precision="bf16")
    comparison = compare(ID)
    assert comparison is not None and comparison.verdict == "cannot_tell"
    (score,) = compare_evaluations(ID)
    assert score.verdict == "cannot_tell" and score.result["score"] == 0.75

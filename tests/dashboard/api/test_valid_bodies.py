"""The API accepts every body that its OpenAPI document calls valid."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from dashboard.helpers.schema_bodies import Bodies
from dashboard.helpers.token_clients import client_with_token
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.api.root import api
from fp8scope_dashboard.wire.schemas import MATRIX_PRECISIONS, SCORE_PRECISIONS

BATCHES = "POST /api/v1/runs/{run}/batches"
REPORTS = "POST /api/v1/runs/{run}/reports"
ENDPOINTS = (
    "PUT /api/v1/runs/{run}",
    "POST /api/v1/runs/{run}/writers/{writer}/tensors",
    "POST /api/v1/runs/{run}/evaluations",
    "POST /api/v1/runs/{run}/finish",
    "POST /api/v1/runs/{run}/heartbeat",
    BATCHES,
    REPORTS,
)
# Those about what the server or an import has made before: an order, or what people added to a run.
OF_EARLIER = ("command", "past_alert", "past_command", "past_note", "past_artefact")


def allowed(body: dict[str, Any]) -> dict[str, Any]:
    """The body under the rules that a description states, because JSON Schema cannot."""
    if body.get("kind") == "reference":
        length = min(len(body["bf16"]), len(body["fp8"]))
        return {**body, "bf16": body["bf16"][:length], "fp8": body["fp8"][:length]}
    if "items" in body:
        if body["kind"] == "proportion":
            body["items"] = [float(item > 0) for item in body["items"]]
        named = (field for field in ("item_ids", "clusters") if body.get(field) is not None)
        body |= {field: [f"{field} {i}" for i in range(len(body["items"]))] for field in named}
        # The schema has "if", "then" and "else" for this; `Bodies` does not follow them.
        precisions = SCORE_PRECISIONS if body.get("matrix") is None else MATRIX_PRECISIONS
        if body.get("precision") not in precisions:
            body["precision"] = precisions[0]
    if "tensors" in body:
        # It begins where the catalogue ends, and names each tensor once.
        names = {tensor["name"]: tensor for tensor in body["tensors"]}
        return {**body, "offset": 0, "tensors": list(names.values())}
    # Addresses of links have rules of their own.
    body.pop("artefact", None)
    if "rows" in body:
        body["rows"] = sorted(body["rows"], key=lambda row: row["step"])
    for row in body.get("rows", ()):
        # Tensors are named after they are registered.
        row.pop("tensors", None)
    return body


@pytest.mark.django_db
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_it_works(endpoint: str) -> None:
    method, path = endpoint.split()
    document = json.loads(json.dumps(api.get_openapi_schema()))
    operation = document["paths"][path][method.lower()]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    client = client_with_token(create_project("research", "Research"))
    client.raise_request_exception = False
    bodies: st.SearchStrategy[Any] = Bodies(document).of(schema)

    @settings(
        max_examples=25, deadline=None, database=None, derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(bodies.filter(lambda body: body.get("kind") not in OF_EARLIER))
    def accepts(body: dict[str, Any]) -> None:
        run, body = uuid.uuid4(), allowed(body)
        if endpoint != ENDPOINTS[0]:
            client.put(f"/api/v1/runs/{run}", json.dumps({"name": "r"}), content_type="application/json")
        address = path.format(run=run, writer=uuid.uuid4())
        answer = client.generic(method, address, json.dumps(body).encode(), content_type="application/json")
        assert answer.status_code in (200, 201), (answer.content[:300], body)

    accepts()

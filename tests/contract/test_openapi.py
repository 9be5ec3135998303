"""The OpenAPI document matches the routes, docs/wire.md and the documented errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import urllib3
from helpers.live_servers import Server

ROOT = Path(__file__).parents[2]
RESOURCES = ("runs", "rules", "project", "alerts", "compare", "figures", "fleet", "token")
METHODS = {"get", "put", "post", "delete", "patch"}
ARROW = "application/vnd.apache.arrow.stream"


@pytest.fixture
def document(server: Server) -> Any:
    response = urllib3.request("GET", f"{server.url}/api/v1/openapi.json", timeout=60)
    assert response.status == 200
    return response.json()


def operations(document: Any) -> dict[str, Any]:
    return {
        f"{method.upper()} {path}": operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if method in METHODS
    }


def test_it_works(document: Any) -> None:
    assert document["openapi"].startswith("3.")
    assert document["info"]["title"] == "fp8scope"


def test_every_endpoint_is_listed(document: Any) -> None:
    """The document lists exactly the routes of Django and the endpoints of docs/wire.md and docs/api.md."""
    from fp8scope_dashboard.api.root import api

    routes = {re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", str(route.pattern)) for route in api.urls[0]}
    served = {route for route in routes if route.startswith(RESOURCES)}
    assert routes - served == {"", "docs", "openapi.json"}
    listed = {name.replace("/api/v1/", "") for name in operations(document)}
    text = "".join((ROOT / "docs" / name).read_text() for name in ("wire.md", "api.md"))
    described = set(re.findall(r"^## ((?:GET|PUT|POST|PATCH|DELETE) /\S+)$", text, re.MULTILINE))
    assert {name.replace(" /", " ") for name in described} == listed
    assert served == {name.partition(" ")[2] for name in listed}


def test_every_endpoint_describes_its_errors_and_needs_a_token(document: Any) -> None:
    listed = operations(document)
    assert len(listed) == 55
    for operation in listed.values():
        assert operation["security"]
        assert operation.get("description")
        for status in ("400", "401", "404", "409", "413", "422", "429", "503"):
            schema = operation["responses"][status]["content"]["application/json"]["schema"]
            assert schema["$ref"].endswith("/ErrorOut")
        assert {"200", "201"} & operation["responses"].keys()


def test_the_body_of_a_batch_is_described(document: Any) -> None:
    content = operations(document)["POST /api/v1/runs/{run}/batches"]["requestBody"]["content"]
    assert content[ARROW]["schema"] == {"type": "string", "format": "binary"}
    assert content["application/json"]["schema"]["required"] == ["protocol", "writer", "seq", "rows"]


def test_parameters_of_reading_endpoints_are_described(document: Any) -> None:
    """Those whose name does not say everything, and which have no list of values."""
    plain = {
        "limit",
        "offset",
        "search",
        "q",
        "rank",
        "before",
        "a",
        "b",
        "run",
        "margin",
        "format",
        "progress",
    }
    for name, operation in operations(document).items():
        for parameter in operation.get("parameters", []) if name.startswith("GET") else ():
            is_named = parameter["in"] == "path" or parameter["name"] in plain | {"statistic"}
            is_listed = "enum" in parameter["schema"] or parameter["schema"].get("type") == "boolean"
            assert parameter.get("description") or is_listed or is_named, (name, parameter["name"])


def test_answers_in_arrow_are_described(document: Any) -> None:
    listed = operations(document)
    for path in ("series", "heatmap", "histograms"):
        content = listed[f"GET /api/v1/runs/{{run}}/{path}"]["responses"]["200"]["content"]
        assert {ARROW, "application/json"} <= content.keys()

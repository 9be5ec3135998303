"""No value of a parameter of the API ends in an error of the server."""

from __future__ import annotations

from typing import Final

import pytest
from dashboard.helpers.seeding import seed_project
from dashboard.helpers.token_clients import client_with_token
from django.utils.http import urlencode

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.api.root import api

VALUES: Final = ("", "-1", "0", "9" * 400, "NaN", "-inf", "1e308", "٣", "x" * 5_000, b"\xed\xa0\x80", "a\0b")
VALUES_OF_PATHS: Final = ("-1", "9" * 400, "x" * 500, "%00", "%ED%A0%80", "..")


@pytest.mark.django_db
def test_it_works() -> None:
    project = create_project("research", "Research")
    run = seed_project(project, 150).faulty
    client = client_with_token(project)
    alert = Alert.objects.earliest("pk").pk
    client.raise_request_exception = False
    asked = 0
    for path, operations in api.get_openapi_schema()["paths"].items():
        if "get" not in operations:
            continue
        parameters = operations["get"].get("parameters", [])
        fields = [parameter["name"] for parameter in parameters if parameter["in"] == "query"]
        address = path.format(run=run.pk, progress=run.pk, name="loss", alert=alert, writer=run.pk, item=1)
        queries = [urlencode({field: value}) for field in fields for value in VALUES]
        queries += [urlencode({field: ["x", "1"] for field in fields}, doseq=True)]
        others = [
            path.format(run=value, progress=value, name=value, alert=value, writer=value, item=value)
            for value in VALUES_OF_PATHS
            if "{" in path
        ]
        for request in (address, *(f"{address}?{query}" for query in queries), *others):
            answer = client.get(request)
            assert answer.status_code < 500 and answer.status_code != 405, request
            asked += 1
    assert asked > 1_000

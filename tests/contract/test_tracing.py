"""Traces of the web server and the worker, as a receiver of OpenTelemetry gets them."""

from __future__ import annotations

import gzip
import importlib
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import redis
import urllib3
from contract.helpers.wire_client import WireClient
from django.conf import settings
from helpers.live_servers import web_server
from helpers.waiting import wait_until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fp8scope_dashboard.accounts.models import Scope
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.instrumentation import tracing
from fp8scope_dashboard.instrumentation.tracing import ServerTracer

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Receiver:
    """An OTLP receiver: the services and the spans that it got."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Keep the test's output free of requests."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, message: ExportTraceServiceRequest) -> None:
        for resource in message.resource_spans:
            service = attributes(resource.resource.attributes)["service.name"]
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]

    def named(self, name: str) -> list[Span]:
        return [span for _, span in self.spans if span.name == name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def attributes(pairs: object) -> dict[str, str]:
    return {
        pair.key: pair.value.string_value or str(pair.value.int_value)
        for pair in pairs  # type: ignore[attr-defined]
    }


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.mark.usefixtures("transactional_db")
def test_requests_are_spans_of_the_clients_trace(tmp_path: Path, receiver: Receiver) -> None:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    project = create_project("default", "Default")
    token = create_token(project, "tests", scopes=list(Scope))[1]
    with redis.Redis.from_url(settings.REDIS_URL) as broker:
        broker.flushdb()
    with web_server(tmp_path / "web.log", **variables) as (url, _):
        client = WireClient(url, token)
        client.register()
        assert client.send(client.batch(0, [1], scalars={"loss": [2.0]})).status == 201
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "X-Request-ID": "4f0c"}
        assert urllib3.request("GET", f"{url}/signin/{'s' * 43}/", headers=headers).status in (200, 404, 410)
        wait_until(lambda: receiver.named("POST batches") and receiver.named("GET pages"), "the spans")
    (batch,) = receiver.named("POST batches")
    described = attributes(batch.attributes)
    assert described["fp8scope.run"] == str(client.run) and described["http.response.status_code"] == "201"
    assert batch.kind == Span.SPAN_KIND_SERVER and batch.end_time_unix_nano > batch.start_time_unix_nano
    pages = [span for span in receiver.named("GET pages") if span.trace_id.hex() == TRACE]
    assert [attributes(span.attributes)["fp8scope.request"] for span in pages] == ["4f0c"]
    assert pages[0].parent_span_id.hex() == "b7ad6b7169203331"
    assert {service for service, _ in receiver.spans} == {"fp8scope-web"}
    assert not any("s" * 43 in str(span) for _, span in receiver.spans), "a sign-in link is a secret"


def test_a_job_continues_the_trace_of_its_request(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{receiver.url}/v1/traces")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    tracer = ServerTracer()
    assert tracer.configure("fp8scope-worker")
    headers: dict[str, str] = {}
    with tracer.request("POST api", {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}, {}):
        tracer.inject(headers)
    for state in ("success", "failure"):
        job = tracer.begin_job(f"job {state}", headers, {"fp8scope.job": state})
        assert job is not None
        job.end(state)
    wait_until(lambda: receiver.named("job success") and receiver.named("job failure"), "the spans")
    (request,), (good,), (bad,) = map(receiver.named, ("POST api", "job success", "job failure"))
    assert {span.trace_id.hex() for span in (request, good, bad)} == {TRACE}
    assert good.parent_span_id == bad.parent_span_id == request.span_id
    assert (good.status.code, bad.status.code) == (0, 2) and attributes(bad.attributes) == {
        "fp8scope.job": "failure"
    }


def test_nothing_is_traced_without_a_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint in tracing.ENDPOINTS:
        monkeypatch.delenv(endpoint, raising=False)
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    tracer, headers = ServerTracer(), dict[str, str]()
    assert not tracer.configure("fp8scope-web")
    with tracer.request("GET pages", {}, {}) as span:
        assert span is None
    tracer.inject(headers)
    assert headers == {} and tracer.begin_job("job", {}, {}) is None


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")

    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with caplog.at_level(logging.WARNING, tracing.__name__):
        assert not ServerTracer().configure("fp8scope-web")
    assert "pip install 'fp8scope[tracing]'" in caplog.text

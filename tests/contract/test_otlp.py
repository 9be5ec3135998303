"""OpenTelemetry's own SDK and exporter against /otlp of a real server: what it exports is stored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import pytest
import urllib3
from helpers.live_servers import Server
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_DELTA
from opentelemetry.sdk.metrics import Counter, Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation
from opentelemetry.sdk.resources import Resource

from fp8scope_dashboard.runs.models import Run, Writer
from fp8scope_dashboard.telemetry import queries

DELTA: dict[type, Any] = dict.fromkeys((Counter, Histogram), AggregationTemporality.DELTA)


@pytest.fixture
def endpoint(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/otlp.md tells users to set."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{server.url}/otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"Authorization=Bearer%20{quote(server.token)}")


def provider(exporter: OTLPMetricExporter, **attributes: Any) -> MeterProvider:
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=1e9)
    return MeterProvider(
        [reader], Resource.create({"service.name": "train", **attributes}), shutdown_on_exit=False
    )


def line(run: Run, name: str) -> list[tuple[int, float]]:
    series = queries.scalar(run.pk, name)
    return list(zip(series.steps.tolist(), series.values.tolist(), strict=True))


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip, Compression.Deflate])
def test_it_works(endpoint: None, compression: Compression) -> None:
    """A training of two ranks that sets a gauge for its step, as docs/otlp.md shows."""
    ranks = [
        provider(
            OTLPMetricExporter(compression=compression),
            **{"nemo.run.id": "night", "nv.dl.rank": rank, "nv.dl.world_size": 2},
        )
        for rank in range(2)
    ]
    for rank, made in enumerate(ranks):
        meter = made.get_meter("training")
        step_gauge, loss, tokens = (
            meter.create_gauge("step"),
            meter.create_gauge("loss"),
            meter.create_counter("tokens"),
        )
        duration = meter.create_histogram("step.duration", unit="s")
        for step in range(1, 6):
            step_gauge.set(step)
            loss.set(3 - step / 7 + rank)
            tokens.add(512)
            duration.record(0.5 * step)
            assert made.force_flush()
        made.shutdown()
    run = Run.objects.get()
    assert line(run, "loss") == [(step, 3 - step / 7) for step in range(1, 6)]
    assert line(run, "tokens") == [(step, 512 * step) for step in range(1, 6)]
    assert line(run, "step.duration/mean") == [(step, 0.5 * step) for step in range(1, 6)]
    assert list(Writer.objects.order_by("rank").values_list("rank", "last_step")) == [(0, 5), (1, 5)]
    assert run.environment["world_size"] == 2 and run.environment["telemetry.sdk.language"] == "python"


def test_steps_as_attributes_and_differences(endpoint: None) -> None:
    made = provider(OTLPMetricExporter(preferred_temporality=DELTA))
    meter = made.get_meter("training")
    loss, tokens = meter.create_gauge("train.loss"), meter.create_counter("tokens.seen")
    for step in range(300):
        loss.set(step / 7, {"step": step})
        tokens.add(2)
        if step % 100 == 99:
            assert made.force_flush()
            time.sleep(1.1)
    made.shutdown()
    run = Run.objects.get()
    assert line(run, "loss") == [(step, step / 7) for step in range(300)] == line(run, "train.loss")
    assert [value for _, value in line(run, "tokens.seen")] == [200, 400, 600]


def test_exponential_histograms(endpoint: None) -> None:
    exporter = OTLPMetricExporter(preferred_aggregation={Histogram: ExponentialBucketHistogramAggregation()})
    made = provider(exporter)
    histogram = made.get_meter("training").create_histogram("norm")
    for value in (1.0, 2.0, 6.0):
        histogram.record(value)
    assert made.force_flush()
    made.shutdown()
    run = Run.objects.get()
    assert {name: line(run, f"norm/{name}")[0][1] for name in ("count", "sum", "mean")} == {
        "count": 3,
        "sum": 9,
        "mean": 3,
    }


class RecordedExporter(OTLPMetricExporter):
    """The exporter, whose data are kept to be exported again."""

    exported: list[MetricsData]

    def export(self, metrics_data: MetricsData, *args: Any, **options: Any) -> MetricExportResult:
        self.__dict__.setdefault("exported", []).append(metrics_data)
        return super().export(metrics_data, *args, **options)


def test_an_export_that_is_repeated_is_stored_once(endpoint: None) -> None:
    exporter = RecordedExporter()
    made = provider(exporter)
    meter = made.get_meter("training")
    meter.create_gauge("loss").set(2.0)
    meter.create_counter("tokens").add(5)
    assert made.force_flush()
    for _ in range(3):
        assert exporter.export(exporter.exported[0]) is MetricExportResult.SUCCESS
    run = Run.objects.get()
    assert (run.rows_stored, run.points_stored) == (1, 2)
    made.shutdown()


def test_a_wrong_token_is_an_error_of_the_exporter(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20fp8s_wrong")
    made = provider(exporter := RecordedExporter(endpoint=f"{server.url}/otlp/v1/metrics"))
    made.get_meter("training").create_gauge("loss").set(2.0)
    made.force_flush()
    assert exporter.export(exporter.exported[0]) is MetricExportResult.FAILURE
    made.shutdown()


@pytest.fixture
def pool() -> Iterator[urllib3.PoolManager]:
    with urllib3.PoolManager(retries=False) as made:
        yield made


def body_of(rank: int) -> bytes:
    request = ExportMetricsServiceRequest()
    resource = request.resource_metrics.add()
    for name, value in (("run.id", "at once"), ("rank", str(rank))):
        resource.resource.attributes.add(key=name).value.string_value = value
    sum_of = resource.scope_metrics.add().metrics.add(name="tokens").sum
    sum_of.aggregation_temporality = AGGREGATION_TEMPORALITY_DELTA
    sum_of.data_points.add(as_int=5, time_unix_nano=1_790_000_000 * 10**9)
    body: bytes = request.SerializeToString()
    return body


def test_ranks_that_begin_at_once_and_exports_that_arrive_twice_at_once(server: Server) -> None:
    """16 requests at a time: eight ranks of a new run, each twice."""
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/x-protobuf"}

    def post(rank: int) -> int:
        with urllib3.PoolManager(retries=False) as made:
            while True:
                answer = made.request(
                    "POST", f"{server.url}/otlp/v1/metrics", headers=headers, body=body_of(rank)
                )
                if answer.status not in (429, 503):
                    return answer.status
                time.sleep(float(answer.headers["Retry-After"]) / 10)

    with ThreadPoolExecutor(16) as threads:
        assert set(threads.map(post, [*range(8), *range(8)])) == {200}
    run = Run.objects.get()
    assert (run.rows_stored, Writer.objects.filter(run=run).count()) == (8, 8)
    assert line(run, "tokens") == [(0, 5)]


def test_the_edge_refuses_in_time_and_form(server: Server, pool: urllib3.PoolManager) -> None:
    """Requests that the application never sees, and a body that is too large for any."""
    address, token = f"{server.url}/otlp/v1/metrics", {"Authorization": f"Bearer {server.token}"}
    kind = {"Content-Type": "application/x-protobuf"}
    assert pool.request("POST", address, headers=kind, body=b"").status == 401
    large = pool.request("POST", address, headers={**kind, **token}, body=bytes(33 << 20))
    assert large.status == 413 and b"too_large" in large.data
    empty = pool.request("POST", address, headers={**kind, **token}, body=b"")
    assert (empty.status, empty.data) == (200, b"") and not Run.objects.exists()

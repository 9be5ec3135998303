"""Requests to /otlp/v1/metrics: what is stored of each kind of metric, refusals, and any bytes."""

from __future__ import annotations

import gzip
import json
import math
import random
import uuid
import zlib
from datetime import timedelta
from typing import Any

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.token_clients import client_with_token
from django.test import Client
from django.utils import timezone
from google.protobuf import json_format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE as CUMULATIVE,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_DELTA as DELTA,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from fp8scope_dashboard.accounts.models import Project, Scope
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.otlp_metrics.body import MAX_BYTES, PROTOBUF
from fp8scope_dashboard.otlp_metrics.models import OtlpWriter
from fp8scope_dashboard.runs.models import Run, Writer
from fp8scope_dashboard.runs.services import mark_silent
from fp8scope_dashboard.telemetry import queries
from fp8scope_dashboard.telemetry.deletion import begin

METRICS = "/otlp/v1/metrics"
SECOND = 10**9
NOW = 1_790_000_000 * SECOND
ATTRIBUTES: dict[str, Any] = {"service.name": "train", "nemo.run.id": "r1"}


@pytest.fixture
def client(project: Project) -> Client:
    return client_with_token(project)


def set_attributes(pairs: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        pair = pairs.add()
        pair.key = name
        kind = {bool: "bool_value", int: "int_value", float: "double_value"}.get(type(value), "string_value")
        setattr(pair.value, kind, value)


def gauge(name: str, value: float, time: int = NOW, **attributes: Any) -> Metric:
    metric = Metric(name=name)
    point = metric.gauge.data_points.add(as_double=value, time_unix_nano=time)
    set_attributes(point.attributes, attributes)
    return metric


def total(name: str, value: int, time: int = NOW, *, delta: bool = False) -> Metric:
    metric = Metric(name=name)
    metric.sum.aggregation_temporality = DELTA if delta else CUMULATIVE
    metric.sum.data_points.add(as_int=value, time_unix_nano=time, start_time_unix_nano=NOW)
    return metric


def histogram(
    count: int, summed: float, time: int, *, delta: bool = False, exponential: bool = False, start: int = NOW
) -> Metric:
    metric = Metric(name="duration")
    data = metric.exponential_histogram if exponential else metric.histogram
    data.aggregation_temporality = DELTA if delta else CUMULATIVE
    data.data_points.add(
        count=count, sum=summed, min=1.0, max=9.0, time_unix_nano=time, start_time_unix_nano=start
    )
    return metric


def message(*metrics: Metric, **attributes: Any) -> ExportMetricsServiceRequest:
    request = ExportMetricsServiceRequest()
    resource = request.resource_metrics.add()
    set_attributes(resource.resource.attributes, {**ATTRIBUTES, **attributes})
    resource.scope_metrics.add().metrics.extend(metrics)
    return request


def post(client: Client, body: bytes, kind: str = PROTOBUF, **headers: str) -> Any:
    return client.post(METRICS, body, content_type=kind, headers=headers)


def export(client: Client, *metrics: Metric, **attributes: Any) -> ExportMetricsPartialSuccess:
    answer = post(client, message(*metrics, **attributes).SerializeToString())
    assert answer.status_code == 200, answer.content
    partial: ExportMetricsPartialSuccess = ExportMetricsServiceResponse.FromString(
        answer.content
    ).partial_success
    return partial


def line(run: Run, name: str) -> dict[int, float]:
    series = queries.scalar(run.pk, name)
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def test_it_works(client: Client) -> None:
    answer = post(client, message(gauge("loss", 2.5, step=7), gauge("lr", 1e-3, step=7)).SerializeToString())
    assert (answer.status_code, answer.content, answer["Content-Type"]) == (200, b"", PROTOBUF)
    run = Run.objects.get()
    assert (run.name, run.state, run.environment["client"]) == ("train r1", "running", "otlp")
    assert line(run, "loss") == {7: 2.5} and line(run, "lr") == {7: 1e-3} == line(run, "learning_rate")
    assert (run.rows_stored, run.points_stored) == (1, 3)


def test_json_with_and_without_compression(client: Client) -> None:
    document = {
        "resourceMetrics": [
            {
                "resource": {"attributes": [{"key": "nemo.run.id", "value": {"stringValue": "j"}}]},
                "scopeMetrics": [
                    {
                        "metrics": [
                            {
                                "name": "loss",
                                "somethingNew": [1],
                                "gauge": {
                                    "dataPoints": [
                                        {
                                            "timeUnixNano": str(NOW),
                                            "asDouble": value,
                                            "attributes": [{"key": "step", "value": {"intValue": str(step)}}],
                                        }
                                        for step, value in ((1, 2.0), (2, "NaN"))
                                    ]
                                },
                            }
                        ]
                    }
                ],
            }
        ]
    }
    body = json.dumps(document).encode()
    for packed, encoding in (
        (body, "identity"),
        (gzip.compress(body), "gzip"),
        (zlib.compress(body), "deflate"),
    ):
        answer = post(client, packed, "application/json", **{"Content-Encoding": encoding})
        assert (answer.status_code, answer.json()) == (200, {})
    values = line(Run.objects.get(), "loss")
    assert values[1] == 2.0 and math.isnan(values[2])
    assert Run.objects.get().points_stored == 2


def test_what_is_sent_again_is_stored_once(client: Client) -> None:
    for _ in range(3):
        export(client, gauge("loss", 2.0, NOW), total("tokens", 5, delta=True))
    export(client, gauge("loss", 1.0, NOW + SECOND), total("tokens", 5, NOW + SECOND, delta=True))
    export(client, gauge("loss", 2.0, NOW), total("tokens", 5, delta=True))
    run = Run.objects.get()
    assert line(run, "loss") == {0: 2.0, 1: 1.0} and line(run, "tokens") == {0: 5, 1: 10}
    assert run.rows_stored == 2 and OtlpWriter.objects.get().next_seq == 2


def test_steps_come_from_the_point_or_from_a_metric_or_are_seconds(client: Client) -> None:
    export(client, gauge("a", 1.0, iteration=3), gauge("b", 1.0, NOW, **{"dl.iteration": "4"}))
    export(client, gauge("a", 2.0, NOW + 9), total("step", 8, NOW + 9))
    export(client, gauge("c", 3.0, NOW + 60 * SECOND + 5))
    run = Run.objects.get()
    assert line(run, "a") == {3: 1.0, 8: 2.0} and line(run, "b") == {4: 1.0}
    assert line(run, "c") == {60: 3.0} and line(run, "step") == {8: 8.0}


def test_the_step_of_a_collection_that_comes_in_parts(client: Client) -> None:
    """Times that differ by microseconds; several collections in a request; and one in several requests."""
    late = [gauge("step", 10.0 + at, NOW + at * SECOND) for at in (0, 5)]
    export(client, *late, *(gauge("a", at, NOW + at * SECOND + 999) for at in (0, 5)))
    export(client, gauge("b", 1.0, NOW + 5 * SECOND - 999))
    export(client, gauge("b", 2.0, NOW + 7 * SECOND))
    run = Run.objects.get()
    assert line(run, "a") == {10: 0, 15: 5} and line(run, "b") == {15: 1.0, 7: 2.0}


def test_many_steps_in_one_request(client: Client) -> None:
    export(client, *(gauge("loss", step / 7, NOW + step, step=step) for step in range(3_000)))
    export(client, gauge("loss", 9.0, NOW + SECOND, step=10))
    assert line(Run.objects.get(), "loss") == {step: 9.0 if step == 10 else step / 7 for step in range(3_000)}


def test_sums(client: Client) -> None:
    for second, value in enumerate((5, 7, 1)):
        at = NOW + second * SECOND
        export(client, total("all", value, at), total("new", value, at, delta=True))
    run = Run.objects.get()
    assert line(run, "all") == {0: 5, 1: 7, 2: 1} and line(run, "new") == {0: 5, 1: 12, 2: 13}


@pytest.mark.parametrize("exponential", [False, True])
def test_histograms(client: Client, exponential: bool) -> None:
    """Totals, and the mean since the last export; a process that begins again counts from 0."""
    sent = [(2, 4.0, NOW), (6, 24.0, NOW), (6, 24.0, NOW), (1, 7.0, NOW + 3)]
    for second, (count, summed, start) in enumerate(sent):
        metric = histogram(count, summed, NOW + second * SECOND, exponential=exponential, start=start)
        export(client, metric)
    run = Run.objects.get()
    assert line(run, "duration/count") == {0: 2, 1: 6, 2: 6, 3: 1}
    assert line(run, "duration/sum") == {0: 4, 1: 24, 2: 24, 3: 7}
    assert line(run, "duration/mean") == {0: 2.0, 1: 5.0, 3: 7.0} and line(run, "duration/min") == {}


def test_histograms_of_differences(client: Client) -> None:
    for second, (count, summed) in enumerate([(2, 4.0), (4, 20.0), (0, 0.0)]):
        export(client, histogram(count, summed, NOW + second * SECOND, delta=True))
    run = Run.objects.get()
    assert line(run, "duration/count") == {0: 2, 1: 6, 2: 6} and line(run, "duration/sum") == {
        0: 4,
        1: 24,
        2: 24,
    }
    assert line(run, "duration/mean") == {0: 2.0, 1: 5.0} and line(run, "duration/max") == {0: 9, 1: 9, 2: 9}


def test_summaries_and_points_without_a_value(client: Client) -> None:
    metric = Metric(name="latency")
    point = metric.summary.data_points.add(count=3, sum=6.0, time_unix_nano=NOW)
    point.quantile_values.add(quantile=0.5, value=2.0)
    empty = Metric(name="none")
    empty.gauge.data_points.add(time_unix_nano=NOW)
    stale = Metric(name="stale")
    stale.gauge.data_points.add(time_unix_nano=NOW, flags=1)
    partial = export(client, metric, empty, stale, Metric(name="nothing"))
    assert partial.rejected_data_points == 1 and "none: a data point has no value" in partial.error_message
    run = Run.objects.get()
    assert {name: line(run, f"latency/{name}") for name in ("count", "sum", "q0.5")} == {
        "count": {0: 3},
        "sum": {0: 6},
        "q0.5": {0: 2},
    }


def test_other_attributes_name_the_series(client: Client) -> None:
    kinds = [
        gauge("tokens.usage", value, NOW, **{"gen_ai.token.type": kind})
        for kind, value in (("in", 1), ("out", 2))
    ]
    strange = [gauge("a", 1.0, place="x y"), gauge("a", 2.0, place="x_y"), gauge("n" * 255, 3.0)]
    export(client, *kinds, *strange)
    run = Run.objects.get()
    assert line(run, "tokens.usage/gen_ai.token.type_in") == {0: 1}
    assert line(run, "tokens.usage/gen_ai.token.type_out") == {0: 2}
    assert len(run.last_scalars) == 5 and all(len(name) <= 128 for name in run.last_scalars)


def test_ranks_are_writers_of_one_run(client: Client) -> None:
    """As NeMo's telemetry names them, in both of its versions, and by the instance where no run is named."""
    for rank in range(3):
        export(
            client,
            gauge("loss", 2.0 + rank, step=1),
            **{"nv.dl.rank": rank, "nv.dl.world_size": 3, "host.name": f"node{rank}"},
        )
    run = Run.objects.get()
    writers = list(Writer.objects.filter(run=run).order_by("rank").values_list("rank", "hostname"))
    assert writers == [(0, "node0"), (1, "node1"), (2, "node2")]
    assert run.environment["world_size"] == 3 and line(run, "loss") == {1: 2.0}
    for number in ("0", "1"):
        request = message(gauge("a", 1.0))
        del request.resource_metrics[0].resource.attributes[:]
        attributes = {"service.name": "x", "service.instance.id": f"abc-rank{number}", "dl.rank": number}
        set_attributes(request.resource_metrics[0].resource.attributes, attributes)
        assert post(client, request.SerializeToString()).status_code == 200
    other = Run.objects.exclude(pk=run.pk).get()
    assert sorted(Writer.objects.filter(run=other).values_list("rank", flat=True)) == [0, 1]


def test_a_rank_on_the_point_counts(client: Client) -> None:
    export(client, gauge("a", 1.0, rank=0), gauge("a", 2.0, rank=5))
    assert sorted(Writer.objects.values_list("rank", flat=True)) == [0, 5]


def test_a_restart_is_the_next_attempt(client: Client) -> None:
    export(client, *(gauge("loss", 3.0, step=step) for step in range(10)), **{"slurm.restart_count": "0"})
    export(
        client, *(gauge("loss", 4.0, NOW + 1, step=step) for step in (5, 6)), **{"slurm.restart_count": "1"}
    )
    assert line(Run.objects.get(), "loss") == {**dict.fromkeys(range(5), 3.0), 5: 4.0, 6: 4.0}


def test_attributes_describe_the_run(client: Client) -> None:
    partial = export(
        client,
        gauge("loss", 1.0),
        **{
            "fp8scope.run.name": "night",
            "fp8scope.precision": "fp8",
            "fp8scope.group": "g",
            "fp8scope.baseline": "bf16",
            "fp8scope.seed": "4",
            "nv.dl.training.config.global_batch_size": 128,
            "nv.dl.rank": 0,
            "host.name": "node",
            "megatron.num_layers": 12,
        },
    )
    run = Run.objects.get()
    assert partial.error_message == ""
    assert (run.name, run.precision, run.group, run.baseline, run.seed) == ("night", "fp8", "g", "bf16", 4)
    assert run.config == {"nv.dl.training.config.global_batch_size": 128, "megatron.num_layers": 12}
    assert run.environment["host.name"] == "node"
    wrong = {"fp8scope.precision": "fp7", "nv.dl.rank": "first", "nemo.run.id": "r2", "nv.dl.world_size": -1}
    warning = export(client, gauge("loss", 1.0), **wrong)
    assert warning.rejected_data_points == 0
    assert all(part in warning.error_message for part in ("fp7", "'first'", "'-1'"))


def test_values_may_go_to_a_run_of_the_agent(client: Client, project: Project) -> None:
    """They belong to its present attempt, which would else hide them, and no detector follows them."""
    run = make_run(project)
    Writer.objects.create(run=run, uuid=uuid.uuid4(), attempt=2, first_step=3, last_step=9)
    export(client, gauge("gpu.power", 300.0, step=4), **{"fp8scope.run.id": str(run.pk)})
    assert line(run, "gpu.power") == {4: 300.0} and Run.objects.count() == 1
    assert Writer.objects.get(run=run, imported=True).attempt == 2
    assert "client" not in Run.objects.get().environment


def test_the_first_metric_with_a_meaning_has_it_or_the_one_of_that_name(client: Client) -> None:
    export(client, gauge("train.loss", 1.0, step=1), gauge("megatron.training.loss", 2.0, step=1))
    export(client, gauge("loss", 3.0, step=2), gauge("train.loss", 4.0, step=2))
    export(client, gauge("train.loss", 5.0, step=3))
    assert line(Run.objects.get(), "loss") == {1: 1.0, 2: 3.0}


@pytest.mark.parametrize("kind", list(MAX_BYTES))
def test_refusals_have_the_form_of_otlp(kind: str, project: Project, client: Client) -> None:
    def said(answer: Any) -> tuple[int, int, str]:
        assert answer["Content-Type"] == kind
        if kind == PROTOBUF:
            status = ExportMetricsPartialSuccess.FromString(answer.content)
            return answer.status_code, status.rejected_data_points, status.error_message
        return answer.status_code, answer.json()["code"], answer.json()["message"]

    assert said(post(Client(), b"{}", kind))[:2] == (401, 16)
    wrong = Client(headers={"authorization": "Bearer fp8s_wrong"})
    assert said(post(wrong, b"{}", kind))[:2] == (401, 16)
    assert said(post(client_with_token(project, Scope.READ), b"{}", kind))[:2] == (403, 7)
    assert said(post(client, b"\xff", kind))[:2] == (400, 3)
    assert said(post(client, b"{}", kind, **{"Content-Encoding": "br"}))[2].startswith(
        "Content-Encoding 'br'"
    )
    assert said(post(client, b"{}", kind, **{"Content-Encoding": "gzip"}))[2].startswith(
        "The body is not comp"
    )
    half = gzip.compress(b"{}" * 9)[:-9]
    assert "not complete" in said(post(client, half, kind, **{"Content-Encoding": "gzip"}))[2]
    bomb = gzip.compress(bytes(MAX_BYTES[kind] + 1))
    assert said(post(client, bomb, kind, **{"Content-Encoding": "gzip"}))[0] == 413
    assert said(post(client, bytes(MAX_BYTES[kind] + 1), kind))[0] == 413
    traces = client.post("/otlp/v1/traces", b"{}", content_type=kind)
    assert said(traces)[:2] == (404, 5) and "OTEL_TRACES_EXPORTER=none" in said(traces)[2]
    assert not Run.objects.exists()


def test_other_types_and_methods(client: Client) -> None:
    assert post(client, b"{}", "text/plain").status_code == 415
    for method in ("get", "put", "delete"):
        assert getattr(client, method)(METRICS).status_code == 405
        assert getattr(Client(), method)(METRICS).status_code == 401


def test_what_cannot_be_stored_is_rejected_and_the_rest_is_stored(client: Client) -> None:
    partial = export(client, gauge("a", 1.0, 5), gauge("b", 2.0), gauge("c", 3.0, 2**63))
    assert partial.rejected_data_points == 2 and "between 1970 and 2200" in partial.error_message
    assert line(Run.objects.get(), "b") == {0: 2.0}
    many = [gauge("a", 1.0, NOW + SECOND, request=number) for number in range(2_100)]
    partial = export(client, *many)
    assert partial.rejected_data_points == 2_100 and "at most 2000" in partial.error_message
    assert len(Run.objects.get().last_scalars) == 1


def test_a_run_of_another_project_is_rejected(client: Client) -> None:
    other = make_run(create_project("other", "Other"))
    request = message(gauge("a", 1.0), **{"fp8scope.run.id": str(other.pk)})
    request.resource_metrics.append(message(gauge("a", 2.0)).resource_metrics[0])
    answer = ExportMetricsServiceResponse.FromString(post(client, request.SerializeToString()).content)
    assert answer.partial_success.rejected_data_points == 1
    assert "another project" in answer.partial_success.error_message
    assert not other.rows_stored and line(Run.objects.exclude(pk=other.pk).get(), "a") == {0: 2.0}


def test_equal_names_in_two_projects_are_two_runs(client: Client) -> None:
    export(client, gauge("a", 1.0))
    export(client_with_token(create_project("other", "Other")), gauge("a", 2.0))
    assert Run.objects.count() == 2


def test_a_deleted_run_does_not_come_back(client: Client) -> None:
    export(client, gauge("a", 1.0))
    run = Run.objects.get()
    begin(run)
    partial = export(client, gauge("a", 1.0, NOW + SECOND))
    assert partial.rejected_data_points == 1 and "deleted" in partial.error_message


def test_a_run_without_heartbeats_is_silent_after_an_hour(client: Client) -> None:
    export(client, gauge("a", 1.0))
    for minutes, state in ((50, "running"), (70, "silent")):
        Run.objects.update(heartbeat_at=timezone.now() - timedelta(minutes=minutes))
        mark_silent()
        assert Run.objects.get().state == state
    export(client, gauge("a", 1.0, NOW + SECOND))
    assert Run.objects.get().state == "running"


VALUES = st.one_of(st.floats(), st.integers(-(2**63), 2**63 - 1))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["loss", "a b", "", "é\0", "step"]), VALUES, st.integers(0, 2**64 - 1), VALUES
        ),
        max_size=6,
    )
)
def test_any_values_are_stored_or_rejected(
    client: Client, points: list[tuple[str, float, int, float]]
) -> None:
    metrics = []
    for name, value, time, attribute in points:
        metric = Metric(name=name)
        point = metric.gauge.data_points.add(time_unix_nano=time)
        setattr(point, "as_double" if type(value) is float else "as_int", value)
        set_attributes(point.attributes, {"step": attribute, "x": attribute})
        metrics.append(metric)
    export(client, *metrics, **{"nemo.run.id": uuid.uuid4().hex})


def test_mutated_requests_are_refused_or_stored(client: Client) -> None:
    """400 bodies with bytes that were replaced, removed or added."""
    chance = random.Random(11)
    whole = message(gauge("loss", 1.0, step=3), total("t", 4), histogram(3, 4.0, NOW)).SerializeToString()
    as_json = json_format.MessageToJson(message(gauge("loss", 1.0, step=3))).encode()
    for body, kind in ((whole, PROTOBUF), (as_json, "application/json")):
        for _ in range(200):
            data, at = bytearray(body), chance.randrange(len(body))
            data[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
            assert post(client, bytes(data), kind).status_code in (200, 400)


def test_deep_nesting_is_refused(client: Client) -> None:
    body = b'{"resourceMetrics":' * 2_000 + b"[" * 2_000
    assert post(client, body, "application/json").status_code == 400
    value: dict[str, Any] = {"stringValue": "x"}
    for _ in range(90):
        value = {"arrayValue": {"values": [value]}}
    document = {"resourceMetrics": [{"resource": {"attributes": [{"key": "k", "value": value}]}}]}
    assert post(client, json.dumps(document).encode(), "application/json").status_code in (200, 400)

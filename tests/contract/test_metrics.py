"""/metrics: counts of real processes, and everything that the alert rules and the dashboard ask for."""

from __future__ import annotations

import json
import math
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
import urllib3
import yaml
from contract.helpers.wire_client import WireClient
from django.conf import LazySettings
from django.test import Client
from helpers.live_servers import Server, Worker, web_server
from helpers.waiting import wait_until
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from fp8scope_dashboard.instrumentation.counts import HASH
from fp8scope_dashboard.instrumentation.metrics import METRICS
from fp8scope_dashboard.monitoring import checks, status

DEPLOY = Path(__file__).parents[2] / "deploy"
Scrape = Callable[[], dict[tuple[str, tuple[str, ...]], float]]


def text() -> str:
    """The answer to Prometheus."""
    answer = Client().get("/metrics", headers={"Authorization": "Bearer let me see"})
    assert answer.status_code == 200 and answer["Content-Type"].startswith("text/plain; version=")
    return answer.content.decode()


@pytest.fixture
def scrape(settings: LazySettings, monkeypatch: pytest.MonkeyPatch) -> Scrape:
    """The samples by name, and the values of labels in the order of their names."""
    monkeypatch.setattr(status, "FRESH_SECONDS", 0.0)
    settings.STATUS_TOKEN = "let me see"
    return lambda: {
        (sample.name, tuple(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in parse(text())
        for sample in family.samples
    }


REPEATED = ("fp8scope_ingest_repeated_messages_total", ())


def test_counts_of_the_web_server_and_the_worker(server: Server, worker: Worker, scrape: Scrape) -> None:
    client = WireClient(server.url, server.token)
    client.register()
    # What a process has counted is written together, later: after these, all that was sent by earlier tests.
    for _ in range(3):
        assert client.send(client.batch(0, [0], scalars={"loss": [2.0]})).status < 300
    wait_until(lambda: scrape().get(REPEATED, 0.0) >= 2.0, "the counts of earlier messages")
    before = scrape()

    def more(name: str, *labels: str) -> float:
        return samples.get((name, labels), 0.0) - before.get((name, labels), 0.0)

    body = client.batch(1, [1, 2, 3], scalars={"loss": [2.0, math.nan, math.nan]})
    for _ in range(2):
        assert client.send(body).status < 300
    wait_until(lambda: scrape().get(("fp8scope_alerts_opened_total", ("critical",))) == 1.0, "the alert")
    wait_until(lambda: scrape()[REPEATED] > before[REPEATED], "both messages")
    samples = scrape()
    assert more("fp8scope_ingest_messages_total") == 1.0
    assert more("fp8scope_ingest_rows_total") == 3.0
    assert more("fp8scope_ingest_points_total") == 3.0
    assert more("fp8scope_ingest_bytes_total") == len(body)
    assert more("fp8scope_http_requests_total", "batches", "201") == 1.0
    # The last of the requests before was perhaps counted after `before`.
    assert 1.0 <= more("fp8scope_http_requests_total", "batches", "200") <= 2.0
    assert more("fp8scope_ingest_lag_seconds_count") == 1.0
    wait_until(
        lambda: scrape().get(("fp8scope_jobs_total", ("success", "alerts.evaluate_waiting")), 0.0) >= 1.0,
        "the job",
        seconds=15,
    )
    samples = scrape()
    assert samples["fp8scope_job_wait_seconds_count", ("alerts.evaluate_waiting",)] >= 1.0
    assert samples["fp8scope_workers", ()] == 1.0 and samples["fp8scope_part_up", ("redis",)] == 1.0
    assert samples["fp8scope_runs_sending", ()] == 1.0
    assert samples["fp8scope_project_runs", ("default",)] == 1.0


def test_the_id_of_a_request_stands_in_the_log(server: Server) -> None:
    request = urllib.request.Request(f"{server.url}/api/v1/nothing", headers={"X-Request-ID": "4f0c-here"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.headers["X-Request-ID"] == "4f0c-here"
    wait_until(lambda: b"[request=4f0c-here]" in server.log.read_bytes(), "the line")


@pytest.mark.usefixtures("transactional_db")
def test_monitoring_asks_a_process_at_its_own_address(tmp_path: Path) -> None:
    """It is answered by plain HTTP, where everybody else is redirected to https."""
    settings = {"FP8SCOPE_STATUS_TOKEN": "let me see", "FP8SCOPE_BASE_URL": "https://fp8.example.org"}
    with web_server(tmp_path / "web.log", **settings) as (url, _):

        def ask(token: str, method: str = "GET") -> tuple[int, str]:
            answer = urllib3.request(
                method, f"{url}/metrics", headers={"Authorization": f"Bearer {token}"}, redirect=False
            )
            return answer.status, answer.data.decode()

        code, body = ask("let me see")
        assert code == 200 and 'fp8scope_part_up{part="postgresql"} 1.0' in body
        assert ask("let me in")[0] == 301 and ask("let me see", "POST")[0] == 301


@pytest.mark.django_db
def test_buckets_are_cumulative_and_openmetrics_is_valid(settings: LazySettings) -> None:
    settings.STATUS_TOKEN = "let me see"
    with redis.Redis.from_url(settings.REDIS_URL) as client:
        client.delete(HASH)
        client.hset(HASH, '["fp8scope_job_seconds", ["x"], "0.5"]', "2")
        client.hset(HASH, '["fp8scope_job_seconds", ["x"], "+Inf"]', "1")
        client.hset(HASH, '["fp8scope_job_seconds", ["x"], "sum"]', "1000.5")
        # Of another version of the server.
        client.hset(HASH, '["fp8scope_job_seconds", ["x", "y"], "0.5"]', "2")
        client.hset(HASH, '["fp8scope_gone", [], ""]', "2")
    answer = Client().get(
        "/metrics",
        headers={
            "Authorization": "Bearer let me see",
            "Accept": "application/openmetrics-text; version=1.0.0",
        },
    )
    families = {family.name: family for family in parse_openmetrics(answer.content.decode())}  # type: ignore[no-untyped-call]
    samples = families["fp8scope_job_seconds"].samples
    buckets = {sample.labels["le"]: sample.value for sample in samples if sample.name.endswith("_bucket")}
    assert buckets["0.1"] == 0.0 and buckets["0.5"] == buckets["600"] == 2.0 and buckets["+Inf"] == 3.0
    assert [sample.value for sample in samples if sample.name.endswith("_sum")] == [1000.5]
    assert "fp8scope_gone" not in families
    assert families["fp8scope_web_process_resident_memory_bytes"].samples[0].value > 1e6


@pytest.mark.django_db
def test_without_redis_only_counters_are_missing(settings: LazySettings, scrape: Scrape) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    samples = scrape()
    assert samples["fp8scope_part_up", ("redis",)] == 0.0 and samples["fp8scope_status", ()] == 3.0
    assert samples["fp8scope_part_up", ("postgresql",)] == 1.0
    assert not any(name.endswith("_total") and "http" in name for name, _ in samples)


@pytest.mark.django_db
def test_only_monitoring_and_administrators_read_them(settings: LazySettings) -> None:
    settings.STATUS_TOKEN = "let me see"
    for header in ("", "Bearer", "Bearer let me in", "Basic let me see"):
        answer = Client().get("/metrics", headers={"Authorization": header})
        assert answer.status_code == 401 and answer["WWW-Authenticate"] == "Bearer"
        assert b"FP8SCOPE_STATUS_TOKEN" in answer.content


def rules() -> dict[str, str]:
    """The expressions of the alert rules by name."""
    document = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    return {rule["alert"]: rule["expr"] for group in document["groups"] for rule in group["rules"]}


def queries() -> list[str]:
    """The expressions of the Grafana dashboard."""
    document = json.loads((DEPLOY / "grafana/server.json").read_text())
    return [target["expr"] for panel in document["panels"] for target in panel["targets"]]


@pytest.mark.django_db
@pytest.mark.usefixtures("scrape")
def test_rules_and_dashboard_ask_for_metrics_that_exist() -> None:
    counters = {f"{metric.name}_total": metric.labels for metric in METRICS if not metric.bounds}
    histograms = {f"{metric.name}_bucket": (*metric.labels, "le") for metric in METRICS if metric.bounds}
    exposed = set(re.findall(r"^# TYPE (\S+)", text(), re.MULTILINE)) | counters.keys() | histograms.keys()
    for expression in [*rules().values(), *queries()]:
        names = set(re.findall(r"\bfp8scope_\w+", expression))
        assert names <= exposed, expression
        for name in names & (counters.keys() | histograms.keys()):
            labels = (counters | histograms)[name]
            selected = re.findall(rf"{name}{{([^}}]*)}}", expression)
            assert set(re.findall(r"(\w+)=", " ".join(selected))) <= set(labels), expression


def test_rules_have_the_bounds_of_the_page() -> None:
    by_name = rules()
    bounds = {
        "Fp8scopeAlertsLate": {checks.WAITS["evaluations"][0], checks.WAITS["deliveries"][0]},
        "Fp8scopeAlertsVeryLate": {checks.WAITS["evaluations"][1]},
        "Fp8scopeVerdictsLate": {checks.WAITS["celery"][1]},
        "Fp8scopeCompactionBehind": {checks.COMPACTION_SECONDS[1]},
        "Fp8scopeDiskFilling": {checks.DISK_SHARES[0]},
        "Fp8scopeDiskFull": {checks.DISK_SHARES[1]},
        "Fp8scopeConnections": {checks.CONNECTION_SHARES[0]},
    }
    for name, expected in bounds.items():
        assert {float(number) for number in re.findall(r"[<>] ([\d.]+)", by_name[name])} == expected

"""Every number of `fp8scope mcp` is the client's, which test_client_equals_pages.py compares with pages."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from contract.helpers.mcp_program import McpProgram, content_of
from dashboard.helpers.seeding import Seeded, seed_project
from dashboard.helpers.visitors import visitor_of
from helpers.live_servers import Server
from mcp import Client as McpClient

import fp8scope
from fp8scope.client import JudgedScore, RunVerdict
from fp8scope_dashboard.accounts.models import Role
from fp8scope_dashboard.pages.formatting import difference


@pytest.fixture
def program(server: Server, tmp_path: Path) -> McpProgram:
    return McpProgram(server.url, server.token, tmp_path / "mcp.log")


@pytest.fixture
def seeded(server: Server) -> Seeded:
    return seed_project(server.project, 150)


def plain(value: Any) -> Any:
    """A value of the client as a tool writes it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, tuple | list):
        return [plain(entry) for entry in value]
    # Narrow spaces of the pages are plain ones.
    return value.replace("\u202f", " ").replace("\xa0", " ") if isinstance(value, str) else value


def check_fields(read: Mapping[str, Any], expected: object, names: str) -> None:
    """The fields of an answer are the attributes of the client's object, bit for bit."""
    for name in names.split():
        value = plain(getattr(expected, name))
        if isinstance(value, datetime):
            assert datetime.fromisoformat(read[name]) == value, name
        else:
            assert read[name] == value, (name, read[name], value)


VERDICT: Final = (
    "verdict measured label explanation final unit delta interval tolerance margin smallest_detectable own "
    "left baseline baseline_runs coverage not_judged warnings"
)
SCORE: Final = (
    "name metric step higher_is_better verdict measured label explanation score baseline_score difference "
    "interval margin smallest_detectable items not_judged warnings"
)


def check_verdict(read: Mapping[str, Any], expected: RunVerdict) -> None:
    check_fields(read, expected, VERDICT)
    assert len(read["members"]) == len(expected.members)
    for member, seed in zip(read["members"], expected.members, strict=True):
        check_fields(member, seed, "run name seed difference left")


def check_scores(read: Sequence[Mapping[str, Any]], expected: Sequence[JudgedScore]) -> None:
    assert len(read) == len(expected) > 0
    for score, judged in zip(read, expected, strict=True):
        check_fields(score, judged, SCORE)


def test_it_works(program: McpProgram, server: Server, seeded: Seeded) -> None:
    reader = fp8scope.Client(server.url, server.token)
    visitor = visitor_of(server.project, "vic", Role.VIEWER)
    stored_runs = (seeded.healthy, seeded.faulty, seeded.baselines[0])
    pages = [visitor.client.get(visitor.address(f"runs/{run.pk}/")).content.decode() for run in stored_runs]

    async def body(client: McpClient) -> None:
        for stored, page in zip(stored_runs, pages, strict=True):
            run = reader.run(stored.pk)
            shown = await content_of(client, "show_run", run=run.id)
            check_verdict(shown["verdict"], run.verdict())
            check_fields(
                shown, run, "id name state precision group seed last_step total_steps tags created_at"
            )
            assert shown["config"] == run.config and shown["statistics"] == run.statistics
            verdict = run.verdict()
            if verdict.delta is not None:
                text = difference(shown["verdict"]["delta"], verdict.unit, signed=True)
                assert " ".join(text.split()) in " ".join(html.unescape(page).split())
            if run.score_verdicts():
                check_scores(shown["scores"], run.score_verdicts())
        await check_list(client, reader)
        await check_series(client, reader, str(seeded.faulty.pk))
        await check_alerts(client, reader)
        await check_rest(client, reader, seeded)

    program(body)


async def check_list(client: McpClient, reader: fp8scope.Client) -> None:
    """The pages of the list together are the client's list."""
    read: list[dict[str, Any]] = []
    after = ""
    while after is not None:
        page = await content_of(client, "list_runs", limit=2, after=after)
        read, after = read + page["runs"], page["next"]
        assert page["total"] == len(reader.runs())
    listed = list(reader.runs())
    assert [row["id"] for row in read] == [run.id for run in listed]
    for row, run in zip(read, listed, strict=True):
        check_fields(row, RunVerdict.of(run.fields["verdict"]), "verdict unit delta interval own")
        assert (row["loss"], row["open_alerts"]) == (run.fields["loss"], run.fields["open_alerts"])
    found = await content_of(client, "list_runs", query="precision:fp8", sort="name")
    assert [row["id"] for row in found["runs"]] == [
        run.id for run in reader.runs("precision:fp8", sort="name")
    ]


async def check_series(client: McpClient, reader: fp8scope.Client, run_id: str) -> None:
    run = reader.run(run_id)
    tensor = run.tensors()[3].name
    for scalar, name in (("loss", ""), ("", tensor)):
        for points in (2_000, 16):
            read = await content_of(
                client, "get_series", run=run_id, points=points, scalar=scalar, tensor=name
            )
            history = run.history(scalar, tensor=name, points=points)
            assert read["steps"] == history.steps.tolist() and read["thinned"] == history.thinned == (
                points == 16
            )
            values = [math.nan if value == "NaN" else value for value in read["values"]]
            np.testing.assert_array_equal(np.array(values, np.float64), history.values)
    part = await content_of(client, "get_series", run=run_id, scalar="loss", first=10, last=19)
    assert part["steps"] == list(range(10, 20))
    scalars = await content_of(client, "list_scalars", run=run_id)
    assert {row["name"]: row["last"] for row in scalars["scalars"]} == {
        name: plain(value) for name, value in run.scalars().items()
    }
    first = await content_of(client, "list_scalars", run=run_id, limit=1)
    rest = await content_of(client, "list_scalars", run=run_id, offset=first["next_offset"])
    assert [*first["scalars"], *rest["scalars"]] == scalars["scalars"]


async def check_alerts(client: McpClient, reader: fp8scope.Client) -> None:
    read: list[dict[str, Any]] = []
    after: int | None = None
    while not read or after is not None:
        page = await content_of(client, "list_alerts", state="all", limit=1, after=after)
        read, after = read + page["alerts"], page["next"]
    alerts = list(reader.alerts(state="all"))
    assert len(read) == len(alerts) == page["total"]
    for row, alert in zip(read, alerts, strict=True):
        check_fields(
            row, alert, "id run_id run kind title severity state step onset_step earliest_step value url"
        )
        check_fields(row, alert, "threshold message opened_at")
        whole = await content_of(client, "get_alert", alert=alert.id)
        assert whole["alert"] == row and whole["evidence"] and whole["history"][-1]["kind"] == "opened"
        table = reader.alert_table(alert.id)
        if not whole["chart_thinned"]:
            assert [column["values"] for column in whole["chart"]] == [
                column["values"] for column in table.get("columns", [])
            ]


async def check_rest(client: McpClient, reader: fp8scope.Client, seeded: Seeded) -> None:
    """Pairs, ranking, evaluations, diagnosis, efficiency and course."""
    run, baseline = reader.run(seeded.faulty.pk), reader.run(seeded.baselines[0].pk)
    pair = await content_of(client, "compare_runs", a=run.id, b=baseline.name)
    judged = reader.compare(run, baseline)
    check_verdict(pair["verdict"], run.verdict())
    check_scores(pair["scores"], judged.evaluations)
    assert (pair["judged"], pair["costs"]) == (run.id, plain(judged.costs))
    entries = await content_of(client, "compare_configurations", a=run.id, b=baseline.id)
    assert entries["entries"] == [
        {key: plain(text) for key, text in entry.items()} for entry in judged.configuration
    ]
    none = await content_of(client, "compare_runs", a=baseline.id, b=reader.run(seeded.baselines[1].pk).id)
    assert none["verdict"] is None and "seeds of the group" in none["reason"]
    ranking = run.ranking(sort="ever", limit=100)
    whole = await content_of(client, "rank_tensors", run=run.id, sort="ever", limit=100)
    check_fields(whole, ranking, "statistic limit total out_of_range still")
    for row, tensor in zip(whole["tensors"], ranking.tensors, strict=True):
        check_fields(row, tensor, "index name onset earliest now ever before after change")
    head = await content_of(client, "rank_tensors", run=run.id, sort="ever", limit=3)
    rest = await content_of(
        client, "rank_tensors", run=run.id, sort="ever", limit=100, offset=head["next_offset"]
    )
    assert [*head["tensors"], *rest["tensors"]] == whole["tensors"]
    scores = await content_of(client, "get_evaluations", run=run.id)
    check_scores(scores["verdicts"], run.score_verdicts())
    for row, score in zip(scores["scores"], run.evaluations(), strict=True):
        check_fields(row, score, "name metric step kind higher_is_better score interval items precision")
    efficiency = await content_of(client, "get_efficiency", run=run.id)
    assert efficiency["phases"] == run.efficiency()["phases"]
    assert [figure["amount"] for figure in efficiency["figures"]] == [
        figure["amount"] for figure in run.efficiency()["figures"]
    ]
    course = await content_of(client, "get_course", run=run.id)
    names = ("step", "earliest", "until", "title", "detail")
    assert [[plain(onset[name]) for name in names] for onset in run.course()] == [
        [onset[name] for name in names] for onset in course["onsets"]
    ]
    assert course["onsets"]
    diagnosis = await content_of(client, "get_diagnosis", run=run.id)
    assert diagnosis["explanation"] == plain(run.diagnosis().get("sentence"))

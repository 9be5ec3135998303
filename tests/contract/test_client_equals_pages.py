"""Every number of the client is the page's: random runs over the real wire, a real server, its real pages."""

from __future__ import annotations

import html
import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from contract.helpers.random_runs import TENSORS, RandomRun, judge, random_runs, send
from dashboard.helpers.visitors import Visitor, visitor_of
from helpers.live_servers import Server
from hypothesis import HealthCheck, Phase, given, settings

from fp8scope.client import Client, StoredRun
from fp8scope_dashboard.accounts.models import Role
from fp8scope_dashboard.pages.formatting import difference, percent
from fp8scope_dashboard.pages.formatting import number as page_number
from fp8scope_dashboard.pages.tensors.ranking import shown
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.text.numbers import NON_FINITE

POINTS = 1_200
"""What a chart of a page reads."""


@settings(
    max_examples=8,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# An example takes seconds, and shrinking one minutes.
@given(runs=random_runs())
def test_it_works(server: Server, visitor: Visitor, runs: list[RandomRun]) -> None:
    Run.with_deleted.all().delete()
    ids = [send(server.url, server.token, run) for run in runs]
    judge(ids)
    client = Client(server.url, server.token)
    read = {uuid.UUID(run.id): run for run in client.runs()}
    assert read.keys() == set(ids)
    for sent, run_id in zip(runs, ids, strict=True):
        run = read[run_id]
        check_facts(run, sent, visitor)
        check_series(run, sent, visitor)
        check_tensors(run, sent, visitor)
        check_verdict(run, visitor)
        check_scores(run, sent, visitor)
    check_list(client, visitor)
    check_alerts(client, visitor)
    check_pairs(client, [str(run_id) for run_id in ids], runs)


@pytest.fixture
def visitor(server: Server) -> Visitor:
    return visitor_of(server.project, "vic", Role.VIEWER)


def page(visitor: Visitor, run: StoredRun, rest: str = "", **query: Any) -> str:
    answer = visitor.client.get(visitor.address(f"runs/{run.id}/{rest}"), query)
    assert answer.status_code == 200, answer.content
    return answer.content.decode()


def texts(markup: str) -> str:
    """The text of a page, as a reader sees it."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", markup)).split())


def spaced(text: str) -> str:
    """A text with plain spaces, as `texts` has."""
    return " ".join(text.split())


def equal(read: Any, expected: Sequence[float | None]) -> None:
    """Bit for bit, with NaN equal to NaN and to no value."""
    values = [math.nan if value is None else value for value in expected]
    np.testing.assert_array_equal(np.asarray(read), np.array(values, np.float64))


def table(visitor: Visitor, run: StoredRun, figure: str, **query: str) -> dict[str, list[Any]]:
    """The data of a chart by the names of its columns; empty without data."""
    answer = visitor.client.get(
        visitor.address(f"runs/{run.id}/figures/{figure}.json"), {"format": "json", "smooth": "0", **query}
    )
    if answer.status_code == 404:
        return {}
    columns = json.loads(answer.content)["columns"]
    return {column["name"]: [NON_FINITE.get(v, v) for v in column["values"]] for column in columns}


def check_facts(run: StoredRun, sent: RandomRun, visitor: Visitor) -> None:
    assert (run.name, run.state, run.seed, run.group) == (sent.name, sent.state, sent.seed, sent.group)
    assert run.config == {"seed": sent.seed, "steps": len(sent.steps)} and run.tags == ["random"]
    assert run.last_step == sent.steps[-1] and run.attempts[0]["first_step"] == sent.steps[0]
    assert run.name in texts(page(visitor, run))


def check_series(run: StoredRun, sent: RandomRun, visitor: Visitor) -> None:
    """A scalar is what was sent, whether all of it or what a chart reads, and what its chart draws."""
    last = run.scalars()
    for name, values in sent.scalars.items():
        steps, expected = sent.expected(values)
        for points in (None, POINTS):
            history = run.history(name, points=points)
            assert history.steps.tolist() == steps and not history.thinned
            equal(history.values, expected)
        if not expected:
            continue
        equal([math.nan if last[name] is None else last[name]], expected[-1:])
        drawn = table(visitor, run, "scalar", name=name)
        if drawn:
            axis, line = list(drawn.values())[:2]
            by_step = dict(zip(axis, line, strict=True))
            equal(history.values, [by_step.get(float(step)) for step in steps])


def check_tensors(run: StoredRun, sent: RandomRun, visitor: Visitor) -> None:
    assert [tensor.name for tensor in run.tensors()] == (list(TENSORS) if sent.tensors else [])
    if not sent.tensors:
        assert run.statistics == []
        return
    for i, name in enumerate(TENSORS):
        steps, expected = sent.expected([row[i] for row in sent.tensors["amax"]])
        history = run.history(tensor=name, statistic="amax")
        assert history.steps.tolist() == steps
        equal(history.values, expected)
        drawn = table(visitor, run, "tensor", tensor=name)
        if expected and drawn:
            by_step = dict(zip(*list(drawn.values())[:2], strict=True))
            # Its axis is logarithmic, and has no place for 0.
            positive = np.where(history.values > 0, history.values, np.nan)
            equal(positive, [by_step.get(float(step)) for step in steps])
    check_map(run, visitor)
    check_ranking(run, visitor)


def check_map(run: StoredRun, visitor: Visitor) -> None:
    heatmap = run.heatmap("amax")
    drawn = table(visitor, run, "heatmap", statistic="amax")
    rows = dict(zip(heatmap.tensors, heatmap.values, strict=True))
    for name, values in list(drawn.items())[1:]:
        # The picture has its values as float32.
        equal(rows[name].astype(np.float32), values)
    assert len(drawn) > 1 or np.isnan(heatmap.values).all()


def check_ranking(run: StoredRun, visitor: Visitor) -> None:
    ranking = run.ranking("saturation_rate", sort="ever")
    rows = re.findall(
        r'data-name="([^"]*)"(.*?)</tr>',
        page(visitor, run, "tensors/ranking", statistic="saturation_rate", sort="ever"),
        re.DOTALL,
    )
    assert [html.unescape(name) for name, _ in rows] == [tensor.name for tensor in ranking.tensors]
    for (_, row), tensor in zip(rows, ranking.tensors, strict=True):
        cells = [texts(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)]
        expected = [
            shown(math.nan if value is None else value, "saturation_rate")
            for value in (tensor.now, tensor.ever)
        ]
        assert cells[1:3] == [spaced(text) for text in expected]


def check_verdict(run: StoredRun, visitor: Visitor) -> None:
    """The number that the page writes is the client's, and the stored one of the comparison exactly."""
    verdict, text = run.verdict(), texts(page(visitor, run))
    assert spaced(verdict.label) in text
    stored = Run.objects.select_related("comparison").get(pk=run.id)
    comparison = getattr(stored, "comparison", None)
    if comparison is None:
        assert verdict.verdict == "" and verdict.delta is None and verdict.members == ()
        return
    result = comparison.result
    assert (verdict.delta, verdict.tolerance, verdict.margin) == (
        result["delta"],
        result["tolerance"],
        result["margin"],
    )
    assert verdict.interval == (None if result["interval"] is None else tuple(result["interval"]))
    assert verdict.own == comparison.own_difference
    assert verdict.smallest_detectable == result["smallest_detectable"]
    assert [member.run for member in verdict.members] == [
        member["run"] for member in (result.get("group") or {}).get("runs", ())
    ]
    if verdict.delta is not None:
        assert spaced(difference(verdict.delta, verdict.unit, signed=True)) in text


def check_scores(run: StoredRun, sent: RandomRun, visitor: Visitor) -> None:
    (score,) = run.evaluations()
    assert score.score == sum(sent.items) / len(sent.items) and score.items == len(sent.items)
    for judged in run.score_verdicts():
        answer = visitor.client.get(visitor.address("evaluations/"), {"run": run.id})
        text = texts(answer.content.decode())
        for value in (judged.score, judged.baseline_score):
            assert spaced(percent(value)) in text
        assert spaced(judged.label) in text and judged.items == len(sent.items)
        stored = Run.objects.get(pk=run.id).evaluation_comparisons.get().result
        assert judged.difference == stored["difference"]
        assert judged.interval == (
            None if stored["difference_interval"] is None else tuple(stored["difference_interval"])
        )


def check_list(client: Client, visitor: Visitor) -> None:
    """The list of runs has the rows, the order and the numbers of the page."""
    markup = visitor.client.get(visitor.address(), {"col": ["seed", "verdict", "state"]}).content.decode()
    rows = re.findall(r'<tr id="row-([^"]+)".*?</tr>', markup, re.DOTALL)
    assert rows == [run.id for run in client.runs()]
    for run_id, row in re.findall(r'<tr id="row-([^"]+)"(.*?)</tr>', markup, re.DOTALL):
        run = client.run(run_id)
        listed: Mapping[str, Any] = next(read.fields for read in client.runs() if read.id == run_id)
        assert spaced(listed["verdict"]["label"]) in texts(row) and run.state in texts(row).lower()
        assert page_number(float(run.seed or 0)) in texts(row)


def check_alerts(client: Client, visitor: Visitor) -> None:
    text = texts(visitor.client.get(visitor.address("alerts/"), {"state": "all"}).content.decode())
    alerts = list(client.alerts(state="all"))
    for alert in alerts:
        assert alert.run in text and alert.title in text
    assert len(alerts) == sum(len(run.alerts()) for run in client.runs())


def check_pairs(client: Client, ids: list[str], runs: list[RandomRun]) -> None:
    """A pair has the verdict of the judged run, in either order; two seeds of one group have none."""
    baseline, judged = ids[0], ids[2]
    for pair in (client.compare(baseline, judged), client.compare(judged, baseline)):
        assert pair.judged == judged and pair.verdict == client.run(judged).verdict()
        assert pair.evaluations == tuple(client.run(judged).score_verdicts())
    assert "seeds of the group" in client.compare(ids[0], ids[1]).reason

"""The client against a real server: pages, long series, figures, and what is deleted meanwhile."""

from __future__ import annotations

import math
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import plotly.graph_objects as go
import pytest
from contract.helpers.wire_client import WireClient
from dashboard.helpers.exponents import histogram_of, store_histograms
from dashboard.helpers.seeding import Seeded, seed_project
from helpers.live_servers import Server

from fp8scope.client import Client, ClientError, RunNotFoundError, reading
from fp8scope_dashboard.accounts.models import Scope
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.runs.models import Run


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server.url, create_token(server.project, "reader", scopes=[Scope.READ])[1])


@pytest.fixture
def seeded(server: Server) -> Seeded:
    return seed_project(server.project, 150)


def test_it_works(client: Client, seeded: Seeded) -> None:
    run = client.run(seeded.faulty.name)
    assert run.id == str(seeded.faulty.pk) == client.run(seeded.faulty.pk).id
    assert client.compare(run, seeded.baselines[0].pk).judged == run.id
    assert client.project()["slug"] == "default" and client.fleet()["runs"] == 5
    assert run.verdict().verdict == "worse" and run.alerts(state="open", severity="critical")
    assert run.ranking().out_of_range > 0 and run.ranking(sort="ever", limit=1).tensors[0].ever is not None
    assert math.isnan(run.history("loss").values[-1]) and run.scalars()["loss"] is not None


def test_reads_every_page_of_runs(client: Client, server: Server) -> None:
    Run.objects.bulk_create(Run(project=server.project, name=f"run {i}", seed=i) for i in range(250))
    listed = client.runs("seed>9", sort="seed")
    assert [run.seed for run in listed] == list(range(10, 250)) and len(listed) == 240
    assert next(iter(client.runs(sort="-seed"))).name == "run 249"
    first = client.runs("seed:7").first()
    assert first is not None and first.seed == 7 and client.runs("seed:1000").first() is None


def test_runs_that_are_deleted_meanwhile_end_no_reading(client: Client, server: Server) -> None:
    Run.objects.bulk_create(Run(project=server.project, name=f"run {i}", seed=i) for i in range(150))
    read = iter(client.runs(sort="seed"))
    seeds = [next(read).seed for _ in range(100)]
    # The page after these begins after the last of them.
    Run.objects.filter(seed__gte=97, seed__lt=105).delete()
    seeds += [run.seed for run in read]
    assert seeds == [*range(100), *range(105, 150)]


def test_a_name_finds_the_newest_run(client: Client, server: Server) -> None:
    ids = [Run.objects.create(project=server.project, name="\x1b[31mgpt").pk for _ in range(3)]
    assert client.run("\x1b[31mgpt").id == str(ids[-1])
    for name in ("gpt", "", "x" * 300, str(uuid.uuid4())):
        with pytest.raises((RunNotFoundError, ClientError)):
            client.run(name)


@pytest.mark.parametrize("arrow", [True, False])
def test_every_step_of_a_long_series(
    client: Client, server: Server, arrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "has_arrow", lambda: arrow)
    wire = WireClient(server.url, server.token)
    assert wire.register().status == 201 and wire.catalogue(()).status == 200
    values = np.random.default_rng(1).standard_normal(230_000)
    values[[3, 150_000]] = np.nan, np.inf
    for seq, first in enumerate(range(0, len(values), 100_000)):
        part = values[first : first + 100_000]
        body = wire.batch(seq, range(first, first + len(part)), scalars={"loss": part.tolist()})
        assert wire.send(body).status == 201
    run = client.run(wire.run)
    history = run.history("loss")
    np.testing.assert_array_equal(history.steps, np.arange(230_000))
    np.testing.assert_array_equal(history.values, values)
    assert not history.thinned and history.how == ""
    middle = run.history("loss", first=149_999, last=150_001)
    assert middle.steps.tolist() == [149_999, 150_000, 150_001] and math.isinf(middle.values[1])
    thinned = run.history("loss", points=20_000)
    assert thinned.thinned and len(thinned) <= 20_000 and "smallest and the largest" in thinned.how
    assert math.isinf(thinned.values[np.flatnonzero(thinned.steps == 150_000)][0])


def test_both_forms_of_a_heat_map_are_equal(
    client: Client, seeded: Seeded, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = client.run(seeded.faulty.pk)
    first = run.heatmap("overflow_rate", columns=37)
    monkeypatch.setattr(reading, "has_arrow", lambda: False)
    second = run.heatmap("overflow_rate", columns=37)
    np.testing.assert_array_equal(first.values, second.values)
    np.testing.assert_array_equal(first.step_edges, second.step_edges)
    assert first.tensors == second.tensors and first.values.shape == (48, len(first.step_edges) - 1)
    assert run.heatmap("nothing").values.shape[0] in (0, 48)


def test_histograms_are_those_of_the_store(client: Client, seeded: Seeded) -> None:
    name = seeded.faulty.tensors.get(index=1).name
    stored = {}
    for step in (10, 20, 40):
        values = np.exp2(np.random.default_rng(step).uniform(-30.0, 10.0, 500))
        values[:3] = 0.0, math.nan, math.inf
        stored[step] = histogram_of(values)
        store_histograms(seeded.faulty, step, {1: stored[step]})
    read = client.run(seeded.faulty.pk).histograms(name)
    assert read.steps.tolist() == [10, 20, 40] and read.exponents.tolist() == list(range(-149, 128))
    for i, counts in enumerate(stored.values()):
        np.testing.assert_array_equal(read.counts[i], counts[1:-1])
        assert (read.zeros[i], read.nonfinite[i]) == (counts[0], counts[-1]) == (1.0, 2.0)
    assert read.pandas().loc[20, -5] == read.counts[1][-5 + 149] and read.polars().columns[0] == "step"
    assert read.arrow().column("counts")[2].as_py() == read.counts[2].tolist()
    assert client.run(seeded.faulty.pk).readiness(format="e4m3")["error"].keys() >= {"mean", "budget"}
    Run.objects.update(environment={"error": "none"})
    assert client.run(seeded.faulty.pk).environment() == {"error": "none"}
    part = client.run(seeded.faulty.pk).histograms(name, first=11, last=39)
    assert part.steps.tolist() == [20]


def test_figures_are_objects_of_plotly(client: Client, seeded: Seeded) -> None:
    run = client.run(seeded.faulty.pk)
    figure = run.figure("loss")
    assert isinstance(figure, go.Figure) and len(figure.data) >= 2
    assert run.figure("grad_norm", log="1").layout.yaxis.type == "log"
    compared = client.figure("delta", runs=[str(seeded.healthy.pk), str(seeded.baselines[0].pk)])
    assert len(compared.data) >= 1
    table = run.figure_table("scalar", name="grad_norm", smooth="0")
    assert table["columns"][1]["values"] == run.history("grad_norm").values.tolist()
    with pytest.raises(ClientError, match="No step times yet"):
        run.figure("efficiency")


def test_wrong_questions_are_refused(client: Client, seeded: Seeded) -> None:
    run = client.run(seeded.healthy.pk)
    for wrong, message in (
        (lambda: run.history(), "Name a scalar"),
        (lambda: run.history("loss", tensor="x"), "Name a scalar"),
        (lambda: run.history("loss", points=7), "from 8 to 100,000"),
        (lambda: run.history(tensor="nothing"), "no such tensor"),
        (lambda: run.heatmap("amax", columns=3_000), "columns"),
        (lambda: run.ranking(sort="x"), "cannot be sorted"),
        (lambda: run.alerts(state="x"), "no state"),
        (lambda: list(client.runs(sort="colour")), "cannot be sorted"),
        (lambda: client.figure("x"), "no figure"),
    ):
        with pytest.raises(ClientError, match=message):
            wrong()
    assert len(run.history("nothing")) == 0 and len(run.histograms(run.tensors()[0].name)) == 0


def test_many_threads_share_a_client(client: Client, seeded: Seeded) -> None:
    run = client.run(seeded.healthy.pk)
    expected = run.history("loss").values
    with ThreadPoolExecutor(8) as pool:
        for history in pool.map(lambda _: run.history("loss"), range(24)):
            np.testing.assert_array_equal(history.values, expected)


def test_a_token_that_only_writes_may_not_list(server: Server, seeded: Seeded) -> None:
    writer = Client(server.url, create_token(server.project, "agent", scopes=[Scope.WRITE])[1])
    with pytest.raises(ClientError, match="scope") as caught:
        writer.runs().first()
    assert caught.value.status == 403


def test_a_notebook_shows_a_run_also_without_the_server(client: Client, seeded: Seeded) -> None:
    run = client.run(seeded.faulty.pk)
    assert "Worse than BF16" in run._repr_html_() and "<svg" in run._repr_html_()
    run._connection.patience = 0.0
    run._connection.url = "http://127.0.0.1:1"
    assert seeded.faulty.name in run._repr_html_()

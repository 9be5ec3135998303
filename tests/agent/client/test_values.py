"""Objects of the client: from answers, as tables, in a notebook; and without packages that are missing."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from agent.helpers.answer_server import Prepared, answer_server
from agent.helpers.stored_rows import RUN, row, verdict

from fp8scope.client import Client, ClientError, RunHistory, RunPair, RunVerdict, StatisticMap
from fp8scope.client.notebook import HEIGHT, line_svg, run_html

HISTORY = RunHistory(name="loss", steps=np.array([1, 3]), values=np.array([2.0, math.nan]))
MAP = StatisticMap(
    statistic="amax",
    tensors=("a", "b"),
    step_edges=np.array([0, 2, 4]),
    values=np.array([[1.0, math.nan], [3.0, 4.0]]),
)
NASTY = "<script>alert(1)</script>\" onload='x' &amp; \x1b[31m"


def test_it_works() -> None:
    read = RunVerdict.of(verdict())
    assert read.interval == (0.005, 0.015) and read.members[0].left and str(read) == "Worse than BF16"
    with pytest.raises(dataclasses.FrozenInstanceError):
        read.delta = 0.0  # type: ignore[misc]


def test_a_pair_without_a_verdict_says_why() -> None:
    reference = {"id": RUN, "name": "a", "url": ""}
    nothing: dict[str, Any] = {
        "judged": None,
        "verdict": None,
        "costs": "",
        "quantities": {},
        "evaluations": [],
    }
    answer: dict[str, Any] = {"a": reference, "b": reference, "reason": "Name two.", **nothing}
    pair = RunPair.of(answer)
    assert (pair.delta, pair.interval, pair.margin, pair.seeds) == (None, None, None, ())
    assert pair.not_judged == ("Name two.",) and pair.a == (RUN, "a")
    judged = RunPair.of({**answer, "judged": reference, "verdict": verdict()})
    assert (judged.delta, judged.margin, judged.judged) == (0.01, 0.0025, RUN)
    assert judged.not_judged == ("Only the first half.",) and judged.seeds[0].name == "a"


def test_a_run_of_the_list_reads_the_rest_when_it_is_asked_for() -> None:
    page = {"runs": [row()], "total": 1, "problems": [], "next": None}
    with answer_server([Prepared(body=page), Prepared(body={**row(), "config": {"lr": 1.0}})]) as server:
        (run,) = Client(server.url, "fp8s_x").runs()
        assert (run.name, run.state, run.seed, run.tags, run.finished_at) == (
            "a run",
            "running",
            1,
            ["t"],
            None,
        )
        assert run.created_at.isoformat() == "2026-01-01T00:00:00+00:00" and len(server.asked) == 1
        assert run.config == {"lr": 1.0} and server.asked[1] == f"/api/v1/runs/{RUN}"
        assert run == run.refresh() and len({run, run.refresh()}) == 1
        assert repr(run) == f"<StoredRun 'a run' running {RUN}>"


def test_as_arrow() -> None:
    table = HISTORY.arrow()
    assert table.column_names == ["step", "value"] and table.column("step").to_pylist() == [1, 3]
    np.testing.assert_array_equal(table.column("value").to_numpy(), HISTORY.values)
    assert MAP.arrow().column("tensor").to_pylist() == ["a", "b"]
    assert MAP.arrow().column("values")[1].as_py() == [3.0, 4.0]


def test_as_pandas() -> None:
    frame = HISTORY.pandas()
    assert frame.index.name == "step" and list(frame.index) == [1, 3] and frame["value"].iloc[0] == 2.0
    assert MAP.pandas().loc["b", 2] == 4.0


def test_as_polars() -> None:
    frame = HISTORY.polars()
    assert frame.columns == ["step", "value"] and frame["step"].to_list() == [1, 3]
    assert MAP.polars().row(1) == ("b", 3.0, 4.0)


@pytest.mark.parametrize("package", ["pyarrow", "pandas", "polars"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ClientError, match=f"pip install {package}"):
        getattr(HISTORY, {"pyarrow": "arrow"}.get(package, package))()


def test_a_figure_without_plotly_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with answer_server([Prepared(body={**row(), "figures": ["loss"]})]) as server:
        run = Client(server.url, "fp8s_x").run(RUN)
        with pytest.raises(ClientError, match="pip install plotly"):
            run.figure("loss")


def test_needs_neither_torch_nor_django_nor_arrow() -> None:
    blocked = ("torch", "django", "pyarrow", "pandas", "polars", "plotly", "fp8scope_dashboard")
    program = f"""
import sys
sys.modules.update(dict.fromkeys({blocked!r}))
import fp8scope
fp8scope.Client("http://127.0.0.1:1", "fp8s_x", patience=0.0)
from fp8scope.cli.reading import alerts, compare, completion, open_page, runs, show, tail
print(sorted(name for name in {blocked!r} if sys.modules.get(name) is not None))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Tags(HTMLParser):
    """The elements and attributes of a document."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes


def tags_of(markup: str) -> Tags:
    parser = Tags()
    parser.feed(markup)
    return parser


def test_a_notebook_shows_the_verdict_and_a_line() -> None:
    line = RunHistory(name="loss", steps=np.arange(50), values=1.0 / np.arange(1.0, 51.0))
    markup = run_html(row(), RunVerdict.of(verdict()), line)
    assert "Worse than BF16" in markup and "Not judged: Only the first half." in markup and "0.02" in markup
    assert set(tags_of(markup).tags) == {"div", "strong", "a", "span", "svg", "path"}


def test_nothing_of_a_run_becomes_markup() -> None:
    nasty = row(name=NASTY, state=NASTY, group=NASTY, precision=NASTY, url="javascript:alert(1)")
    shown = RunVerdict.of(verdict(label=NASTY, explanation=NASTY, not_judged=[NASTY], verdict=NASTY))
    parsed = tags_of(run_html(nasty, shown, RunHistory(name=NASTY, steps=np.arange(2), values=np.ones(2))))
    assert set(parsed.tags) <= {"div", "strong", "span", "svg", "path"}
    assert not [name for name, _ in parsed.attributes if name.startswith("on") or name in ("href", "src")]


@pytest.mark.parametrize(
    "values",
    [
        [],
        [1.0],
        [math.nan] * 3,
        [1.0, math.nan, math.inf, -math.inf, 2.0],
        [5.0] * 20,
        [1e308, -1e308, 0.0],
        [5e-324, 0.0],
    ],
)
def test_a_line_stays_in_its_box(values: list[float]) -> None:
    with np.errstate(over="ignore"):
        markup = line_svg(np.array(values))
    path = dict(tags_of(markup).attributes)["d"] or ""
    numbers = [part.split() for part in path.replace("M", " |").replace("L", " |").split("|") if part.strip()]
    assert all(0.0 <= float(down) <= HEIGHT for _, down in numbers)
    assert "nan" not in markup and "inf" not in markup

"""The tab of the console log: lines, search, links to a line, the file."""

from __future__ import annotations

import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.visitors import Visitor

from fp8scope_dashboard.runs import console
from fp8scope_dashboard.runs.console import NewLine
from fp8scope_dashboard.runs.models import ConsoleLine, Run, Writer


def write(run: Run, *texts: str, rank: int = 0) -> None:
    writer = Writer.objects.get(uuid=Recorder(run=run, rank=rank).uuid)
    lines = [NewLine(number, run.created_at, 1, "stdout", text) for number, text in enumerate(texts)]
    console.store(run, writer, lines)


def tab(visitor: Visitor, run: Run, query: str = "") -> str:
    return visitor.client.get(visitor.address(f"runs/{run.id}/?tab=console{query}")).content.decode()


def test_it_works(viewer: Visitor) -> None:
    run = make_run(viewer.project, "r")
    assert "FP8SCOPE_CONSOLE=off" in tab(viewer, run)
    write(run, "loss <b>2</b>", "lr 1e-3")
    write(run, "from rank 3", rank=3)
    page = tab(viewer, run)
    assert "loss &lt;b&gt;2&lt;/b&gt;" in page and "lr 1e-3" in page and "from rank 3" not in page
    assert "The newest 2 lines" in page and 'data-refresh-on="console"' in page
    assert "from rank 3" in tab(viewer, run, "&rank=3")
    assert "loss" in tab(viewer, run, "&rank=99")


def test_search_and_links(viewer: Visitor) -> None:
    run = make_run(viewer.project, "r")
    write(run, *[f"line {number}" for number in range(1_200)])
    page = tab(viewer, run)
    assert (
        "line 1199<" in page and "line 700<" in page and "line 699<" not in page and "Earlier lines" in page
    )
    first = ConsoleLine.objects.get(number=700)
    own = f"/p/research/runs/{run.id}/?tab=console&amp;rank=0"
    assert f'href="{own}&amp;before={first.pk}"' in page
    assert f'href="{own}&amp;line={first.pk}#line-{first.pk}"' in page
    earlier = tab(viewer, run, f"&before={first.pk}")
    assert "line 200<" in earlier and "line 699<" in earlier and "line 700<" not in earlier
    found = tab(viewer, run, "&q=line")
    assert f"before={first.pk}&amp;q=line" in found, "earlier lines with the text"
    found = tab(viewer, run, "&q=LINE+11")
    assert "line 1100<" in found and "line 12<" not in found and 'data-refresh-on="console"' not in found
    marked = ConsoleLine.objects.get(number=10)
    page = tab(viewer, run, f"&line={marked.pk}")
    assert page.count('aria-current="true"') >= 1 and "line 10<" in page and "line 700<" not in page
    for query in ("&line=x", "&line=-1", "&before=" + "9" * 30, "&rank=abc"):
        assert "line 1199<" in tab(viewer, run, query)


# The file is made in another thread, with a connection of its own.
@pytest.mark.django_db(transaction=True)
def test_the_file(viewer: Visitor, stranger: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(viewer.project, "a run")
    lines = ["one", "", "<two>", "a\\n\u00e4", "five"]
    write(run, *lines)
    write(run, "from rank 3", rank=3)
    path = f"runs/{run.id}/console/rank0.log"
    for size in (1, 2, len(lines), 5_000):
        monkeypatch.setattr("fp8scope_dashboard.runs.console.PIECE", size)
        answer = viewer.client.get(viewer.address(path))
        assert b"".join(answer).decode().split("\n")[1:] == [*lines, ""]
    assert answer["Content-Disposition"] == 'attachment; filename="a-run-rank0.log"'
    assert stranger.client.get(viewer.address(path)).status_code == 404
    part = viewer.client.get(viewer.address(f"runs/{run.id}/console/lines")).content.decode()
    assert part.startswith('<div id="console-lines"') and "<html" not in part

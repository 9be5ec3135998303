"""The catalogue and the ranking of tensors over HTTP are those of the run's page."""

from __future__ import annotations

import re
from html import unescape

import pytest
from dashboard.helpers.reading import Reader
from dashboard.helpers.recording import make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor, run_html

from fp8scope_dashboard.pages.formatting import written
from fp8scope_dashboard.pages.tensors.ranking import SORTS, shown
from fp8scope_dashboard.text.onsets import steps_in_words


def test_it_works(reader: Reader, seeded: Seeded) -> None:
    answer = reader.json(f"/runs/{seeded.faulty.pk}/tensors")
    names = list(seeded.faulty.tensors.order_by("index").values_list("name", flat=True))
    assert [tensor["name"] for tensor in answer["tensors"]] == names and answer["total"] == len(names)
    assert "overflow_rate" in answer["statistics"] and "input" in answer["roles"]


def test_the_catalogue_has_pages_and_filters(reader: Reader, seeded: Seeded) -> None:
    path = f"/runs/{seeded.faulty.pk}/tensors"
    every = reader.json(path, filter="mlp", role="input")
    assert {tensor["role"] for tensor in every["tensors"]} == {"input"}
    assert all("mlp" in tensor["name"] for tensor in every["tensors"])
    parts = [reader.json(path, filter="mlp", role="input", limit=2, offset=i) for i in (0, 2)]
    assert [*parts[0]["tensors"], *parts[1]["tensors"]] == every["tensors"][:4]
    assert {part["total"] for part in parts} == {every["total"]}


@pytest.mark.parametrize("sort", SORTS)
def test_the_ranking_is_that_of_the_page(reader: Reader, seeded: Seeded, viewer: Visitor, sort: str) -> None:
    run = seeded.faulty
    answer = reader.json(f"/runs/{run.pk}/tensors/ranking", sort=sort, statistic="overflow_rate")
    page = run_html(viewer, run, f"tensors/ranking?sort={sort}&statistic=overflow_rate")
    rows = re.findall(r'data-name="([^"]*)"(.*?)</tr>', page, re.DOTALL)
    assert [name for name, _ in rows] == [tensor["name"] for tensor in answer["tensors"]][: len(rows)]
    assert len(rows) >= 5
    for (_, row), tensor in zip(rows, answer["tensors"], strict=False):
        cells = [
            unescape(re.sub(r"<[^>]+>", "", cell)).strip()
            for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
        ]
        onset = steps_in_words(tensor["onset"], tensor["earliest"] - 1) if tensor["onset"] is not None else ""
        assert cells[0] == (f"step {written(onset)}" if onset else "none")
        assert cells[1:3] == [shown(tensor[name], "overflow_rate") for name in ("now", "ever")]


def test_the_statistic_and_the_order_must_exist(reader: Reader, seeded: Seeded) -> None:
    path = f"/runs/{seeded.faulty.pk}/tensors/ranking"
    refusal = reader.refused(path, statistic="colour")
    assert "no statistic 'colour'" in refusal["message"] and "amax" in refusal["hint"]
    assert "onset, now, ever, change" in reader.refused(path, sort="colour")["hint"]


def test_a_run_without_tensors_has_an_empty_ranking(reader: Reader, viewer: Visitor) -> None:
    run = make_run(viewer.project, "run")
    assert reader.json(f"/runs/{run.pk}/tensors/ranking")["tensors"] == []
    assert reader.json(f"/runs/{run.pk}/tensors") == {
        "total": 0,
        "statistics": [],
        "roles": [],
        "tensors": [],
    }

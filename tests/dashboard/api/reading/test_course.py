"""What happened in a run, its ranks, and what differs between two runs, are those of the pages."""

from __future__ import annotations

import html as entities
import re

import numpy as np
from dashboard.helpers.reading import Reader
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor, html


def text_of(markup: str) -> str:
    return " ".join(entities.unescape(re.sub(r"<[^>]+>", " ", markup)).split())


def test_it_works(reader: Reader, seeded: Seeded, viewer: Visitor) -> None:
    answer = reader.json(f"/runs/{seeded.faulty.pk}/course")
    page = text_of(html(viewer, f"runs/{seeded.faulty.pk}/"))
    assert len(answer["onsets"]) >= 3 and answer["calm"] == ""
    for onset in answer["onsets"]:
        assert " ".join(onset["title"].split()) in page and onset["earliest"] <= onset["step"]
    assert [onset["step"] for onset in answer["onsets"]] == sorted(
        onset["step"] for onset in answer["onsets"]
    )


def test_a_run_in_which_nothing_happened_says_so(reader: Reader, viewer: Visitor) -> None:
    run = make_run(viewer.project, "calm", group="bf16", precision="bf16", total_steps=10)
    recorder = Recorder(run=run)
    recorder.rows(range(1, 11), {"loss": np.ones(10)})
    recorder.finish()
    answer = reader.json(f"/runs/{run.pk}/course")
    assert answer["onsets"] == [] and answer["calm"] in text_of(html(viewer, f"runs/{run.pk}/"))


def test_ranks(reader: Reader, viewer: Visitor) -> None:
    run = make_run(viewer.project, "ranks")
    for rank, last in ((0, 10), (1, 7)):
        Recorder(run=run, rank=rank).rows(range(1, last + 1), {"loss": np.ones(last)})
    answer = reader.json(f"/runs/{run.pk}/ranks")
    assert answer["total"] == 2 and answer["disagreement"] is None
    assert [(rank["rank"], rank["last_step"], rank["lag"]) for rank in answer["ranks"]] == [
        (0, 10, 0),
        (1, 7, 3),
    ]
    page = text_of(html(viewer, f"runs/{run.pk}/ranks"))
    assert all(rank["state"] in page for rank in answer["ranks"])


def test_what_differs_between_two_runs(reader: Reader, viewer: Visitor) -> None:
    first = make_run(viewer.project, "a", seed=1, config={"lr": 1e-3, "model": {"depth": 12, "width": 8}})
    second = make_run(viewer.project, "b", seed=2, config={"lr": 1e-3, "model": {"depth": 24}})
    pair = reader.json("/compare", a=first.pk, b=second.pk)
    page = text_of(html(viewer, f"compare/configuration?runs={first.pk}&runs={second.pk}"))
    differing = {entry["key"]: (entry["a"], entry["b"]) for entry in pair["configuration"]}
    assert differing == {
        "config.model.depth": ("12", "24"),
        "config.model.width": ("8", None),
        "seed": ("1", "2"),
    }
    assert all(key.rpartition(".")[2] in page for key in differing)
    assert reader.json("/compare", a=first.pk, b=first.pk)["configuration"] == []

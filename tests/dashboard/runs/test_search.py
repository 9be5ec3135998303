"""Which runs a search finds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from dashboard.helpers.recording import make_run
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.django import TestCase

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.runs.models import Run, RunState
from fp8scope_dashboard.runs.search import read, search, vocabulary_of

DELAYED = {"recipe": "DelayedScaling", "margin": 2, "fp8_format": "HYBRID", "reduce_amax": True}
OCTOBER = datetime(2026, 10, 1, 12, tzinfo=UTC)


def found(text: str) -> set[Any]:
    query = read(text, vocabulary_of(Project.objects.get()))
    assert query.problems == ()
    return set(search(Run.objects.all(), query).values_list("pk", flat=True))


@pytest.fixture
def runs(db: None) -> dict[str, Run]:
    project = Project.objects.create(slug="default", name="Default")
    fp8 = {"precision": "fp8", "recipe": DELAYED, "recipe_name": "DelayedScaling", "baseline": "bf16"}
    delayed = make_run(
        project, "gpt small", group="fp8-d", tags=["two words", "x"], seed=3, last_step=300,
        created_at=OCTOBER, heartbeat_at=OCTOBER + timedelta(hours=3), total_steps=1_000,
        last_scalars={"loss": 2.25, "grad norm": 0.5, "train/acc": 0.7},
        config={"lr": 3e-4, "model": {"depth": 12, "name": "GPT-2"}, "flags": [1, 2], "fused": True}, **fp8,
    )  # fmt: skip
    mxfp8 = make_run(
        project, "GPT large", precision="fp8", recipe_name="MXFP8", recipe={"recipe": "MXFP8"}, tags=["x"],
        last_scalars={"loss": "NaN", "train/acc": 0.1}, last_step=12_000,
        config={"lr": "1e-3", "model.depth": 24, "fused": False}, created_at=OCTOBER + timedelta(days=1),
        heartbeat_at=OCTOBER + timedelta(days=1, minutes=5),
    )  # fmt: skip
    shadow = make_run(
        project, "bf16", precision="bf16", group="bf16", recipe_name="shadow:DelayedScaling",
        recipe={"shadow": DELAYED}, state=RunState.FAILED, last_scalars={"loss": "Infinity"},
        config={"lr": None, "model": {"depth": "deep"}}, finished_at=timezone.now(),
    )  # fmt: skip
    Comparison.objects.create(
        run=delayed, baseline="bf16", to_step=300, verdict="worse", result={"delta": 0.01}
    )
    for step, severity in enumerate(("warning", "critical")):
        Alert.objects.create(run=mxfp8, kind="loss_not_finite", severity=severity, step=9, onset_step=step)
    return {"delayed": delayed, "mxfp8": mxfp8, "shadow": shadow}


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", "delayed mxfp8 shadow"),
        ("precision:FP8", "delayed mxfp8"),
        ("precision:fp8 precision:bf16", "delayed mxfp8 shadow"),
        ("-precision:fp8", "shadow"),
        ("recipe:delayed", "delayed"),
        ("recipe:shadow", "shadow"),
        ('recipe:""', ""),
        ("recipe:DelayedScaling margin:2", "delayed"),
        ("margin:2", "delayed shadow"),
        ("margin:2.0", "delayed shadow"),
        ("margin>1", "delayed shadow"),
        ("margin:3", ""),
        ("-margin:2", "mxfp8"),
        ("format:hybrid", "delayed shadow"),
        ("recipe.reduce_amax:true precision:fp8", "delayed"),
        ("state:failed", "shadow"),
        ("state:FAILED state:running", "delayed mxfp8 shadow"),
        ("group:fp8-d", "delayed"),
        ("group:fp8*", "delayed"),
        ('group:""', "mxfp8"),
        ("group:*", "delayed shadow"),
        ("baseline:bf16", "delayed"),
        ("seed:3", "delayed"),
        ("-seed:3", "mxfp8 shadow"),
        ("seed<4", "delayed"),
        ("-seed<4", "mxfp8 shadow"),
        ("tag:x", "delayed mxfp8"),
        ("-tag:x", "shadow"),
        ('tag:x tag:"two words"', "delayed"),
        ("two words", "delayed"),
        ("gpt", "delayed mxfp8"),
        ("gpt large", "mxfp8"),
        ("gpt -large", "delayed"),
        ("gpt precision:bf16", ""),
        ("failed", "shadow"),
        ("-failed", "delayed mxfp8"),
        ("FAILED bf16", "shadow"),
        ("failed gpt", ""),
        ('"failed"', ""),
        ("running", "delayed mxfp8"),
        ("crashed", "shadow"),
        ("state:crashed", "shadow"),
        ("done", ""),
        ("name:small", "delayed"),
        ("FP8-d", "delayed"),
        ("100%", ""),
        ("loss<2.5", "delayed"),
        ("loss>2.5", "shadow"),
        ("loss>2 loss<3", "delayed"),
        ("loss:nan", "mxfp8"),
        ("loss:inf", "shadow"),
        ("-loss<2.5", "mxfp8 shadow"),
        ('scalar.train/acc>=0.7', "delayed"),
        ("train/acc<0.7", "mxfp8"),
        ("scalar.nothing<1", ""),
        ("step>300", "mxfp8"),
        ("step>=300", "delayed mxfp8"),
        ("step>=12k", "mxfp8"),
        ("planned:1000", "delayed"),
        ("config.lr:3e-4", "delayed"),
        ("config.lr:0.0003", "delayed"),
        ("config.lr>=1e-3", "mxfp8"),
        ("lr<1", "delayed mxfp8"),
        ("config.lr:null", "shadow"),
        ("config.lr:*", "delayed mxfp8 shadow"),
        ("-config.fused:*", "shadow"),
        ("config.model.depth:12", "delayed"),
        ("config.model.depth>12", "mxfp8"),
        ("config.model.depth:DEEP", "shadow"),
        ("config.model.name:gpt-*", "delayed"),
        ("config.model.name:gpt.2", ""),
        ("config.flags:2", "delayed"),
        ("config.flags[0]:1", "delayed"),
        ("config.fused:true", "delayed"),
        ("fused:false", "mxfp8"),
        ("created:2026-10-01", "delayed"),
        ("created>2026-10-01", "mxfp8 shadow"),
        ("created>=2026-10-01T12:00 created<2026-10-02", "delayed"),
        ("created<=2026-10-02", "delayed mxfp8"),
        ("duration>2h", "delayed"),
        ("duration<10min", "mxfp8 shadow"),
        ("age<1h", "shadow"),
        ("ended>2026-10-01", "shadow"),
        ("-ended>2026-10-01", "delayed mxfp8"),
        ("verdict:worse", "delayed"),
        ("verdict:none", "mxfp8 shadow"),
        ("-verdict:worse", "mxfp8 shadow"),
        ("delta>0.5%", "delayed"),
        ("delta>2%", ""),
        ("alerts:yes", "mxfp8"),
        ("alerts:no", "delayed shadow"),
        ("alerts:critical", "mxfp8"),
        ("alerts>1", "mxfp8"),
        ("alerts>2", ""),
        ("alerts<1", "delayed shadow"),
        ("alerts:0", "delayed shadow"),
    ],
)  # fmt: skip
def test_matches(runs: dict[str, Run], text: str, matches: str) -> None:
    assert found(text) == {runs[name].pk for name in matches.split()}


def test_a_word_of_a_state_also_finds_names_with_it(runs: dict[str, Run]) -> None:
    Run.objects.filter(pk=runs["mxfp8"].pk).update(name="sweep of failed runs")
    assert found("failed") == {runs["mxfp8"].pk, runs["shadow"].pk}
    assert found('"failed"') == {runs["mxfp8"].pk}
    assert found("-failed") == {runs["delayed"].pk}


def test_a_run_by_its_id(runs: dict[str, Run]) -> None:
    pk = runs["delayed"].pk
    assert found(f"id:{pk}") == found(f"id:{str(pk)[:13]}") == {pk}


def test_archived_runs_are_hidden_unless_asked_for(runs: dict[str, Run]) -> None:
    Run.objects.filter(pk=runs["mxfp8"].pk).update(archived_at=timezone.now())
    assert found("gpt") == {runs["delayed"].pk}
    assert found("archived:yes") == {runs["mxfp8"].pk}
    assert found("gpt archived:all") == {runs["delayed"].pk, runs["mxfp8"].pk}
    assert found("archived:no") == {runs["delayed"].pk, runs["shadow"].pk}


def test_the_vocabulary_is_that_of_the_project(runs: dict[str, Run]) -> None:
    other = Project.objects.create(slug="other", name="Other")
    make_run(other, "elsewhere", last_scalars={"secret": 1}, config={"secret": {"key": 1}})
    known = vocabulary_of(runs["delayed"].project)
    assert known.scalars == ("grad norm", "loss", "train/acc")
    assert set(known.config) == {"lr", "model.depth", "model.name", "flags", "fused"}
    assert known.config_named("depth") == ("model.depth",)
    assert vocabulary_of(other).config == ("secret.key",)


NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)


class AnySearchRuns(TestCase):
    """PostgreSQL takes whatever people type."""

    def setUp(self) -> None:
        self.project, _ = Project.objects.get_or_create(slug="any", name="Any")
        make_run(self.project, "run", config={"a": {"b": "1e-4"}}, last_scalars={"loss": 1.0})

    @given(
        st.sampled_from(["config.", "scalar.", "recipe.", "summary.", "environment.", ""]),
        NAMES,
        st.sampled_from([":", "<", "<=", ">", ">=", "!="]),
        NAMES,
    )
    def test_entries(self, prefix: str, name: str, operator: str, value: str) -> None:
        list(search(Run.objects.all(), read(f"{prefix}{name}{operator}{value}")))

    @given(st.text(max_size=60))
    def test_texts(self, text: str) -> None:
        list(search(Run.objects.all(), read(text, vocabulary_of(self.project))))


@pytest.mark.django_db
@pytest.mark.parametrize(
    "text",
    ["%_\\", "recipe.a:{", "margin:nan", "margin:1e999", "\0", "'; --", 'config.a":1', "config.a.b.c.d.e.f:1",
     "config.x:\\", "group:*[", "name:%", "config.a:(((", "scalar.a[0]>1", "config.[0]:1"],
)  # fmt: skip
def test_the_database_takes_any_search(text: str) -> None:
    assert list(search(Run.objects.all(), read(text))) == []

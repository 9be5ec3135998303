"""Frozen reports: making one, its links, and what people without an account see."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor
from django.test import Client
from django.urls import set_script_prefix
from django.utils import timezone

from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.pages.compare.runs import MAX_CHOSEN
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.shared_reports.models import SharedReport, ShareLink
from fp8scope_dashboard.text.run_summary import RunFacts, paragraph

ALL = ["summary", "loss", "delta", "evaluations", "heatmap", "alerts", "settings"]


@pytest.fixture
def run(admin: Visitor) -> Run:
    return make_run(admin.project, "gpt fp8", precision="fp8")


def make(visitor: Visitor, chosen: list[Run], **fields: object) -> str:
    """Submit the form; returns the page that follows."""
    data = {"title": "FP8 holds", "parts": ALL, "runs": [str(run.pk) for run in chosen], **fields}
    return visitor.client.post(visitor.address("reports/new"), data, follow=True).content.decode()


def link_of(visitor: Visitor, lifetime: str = "30 days") -> str:
    """Make a link of the only report; returns its path."""
    report = SharedReport.objects.get()
    address = visitor.address(f"reports/{report.pk}/links")
    page = visitor.client.post(address, {"lifetime": lifetime}).content.decode()
    (path,) = re.findall(r"https?://[^/]+(/shared/[\w-]+/)", page)
    return str(path)


def test_it_works(member: Visitor, seeded: Seeded) -> None:
    page = make(member, [seeded.faulty, *seeded.baselines], text="We **tried**.")
    report = SharedReport.objects.get()
    sections = report.content["sections"]
    assert [section["kind"] for section in sections] == [
        "text", "summary", "figure", "figure", "forest", "figure", "alerts", "settings"
    ]  # fmt: skip
    assert all(section["svg"].startswith("<svg") for section in sections if section["kind"] == "figure")
    assert "<strong>tried</strong>" in page and "Worse than BF16" in page
    visitor = Client().get(link_of(member))
    assert visitor.status_code == 200
    assert "<strong>tried</strong>" in visitor.content.decode()


def test_makes_reports_on_a_server_below_a_prefix(member: Visitor, seeded: Seeded) -> None:
    address = member.address("reports/new")
    set_script_prefix("/fp8/")
    try:
        data = {"title": "Below", "parts": ["loss"], "runs": [str(seeded.healthy.pk)]}
        assert member.client.post(address, data).status_code == 302
    finally:
        set_script_prefix("/")
    (section,) = SharedReport.objects.get().content["sections"]
    assert section["svg"].startswith("<svg")


def test_a_report_does_not_change_with_its_runs(member: Visitor, seeded: Seeded) -> None:
    make(member, [seeded.healthy])
    path = link_of(member)
    before = Client().get(path).content
    Comparison.objects.all().delete()
    Run.objects.filter(pk=seeded.healthy.pk).update(name="renamed", state="failed")
    assert Client().get(path).content == before


def test_a_shared_page_shows_nothing_else_of_the_server(member: Visitor, run: Run) -> None:
    make(member, [run])
    answer = Client().get(link_of(member))
    page = answer.content.decode()
    assert "noindex" in answer["X-Robots-Tag"] and answer["Referrer-Policy"] == "no-referrer"
    assert "script-src" not in answer["Content-Security-Policy"]
    assert "no-store" in answer["Cache-Control"]
    assert not re.search(r'href="/(?!static/)', page) and "<script" not in page and "<form" not in page
    assert member.project.slug not in page and str(run.pk) not in page


def test_only_the_hash_of_a_link_is_stored(member: Visitor, run: Run) -> None:
    make(member, [run], parts=["summary"])
    secret = link_of(member).split("/")[2]
    assert len(secret) >= 43
    link = ShareLink.objects.get()
    assert secret.encode() not in bytes(link.digest)
    page = member.client.get(member.address(f"reports/{link.report_id}/")).content.decode()
    assert secret not in page


def test_revoked_expired_and_unknown_links_look_the_same(member: Visitor, run: Run) -> None:
    make(member, [run], parts=["summary"])
    paths = [link_of(member), link_of(member), "/shared/unknown/"]
    expired, revoked = ShareLink.objects.order_by("id")
    ShareLink.objects.filter(pk=expired.pk).update(expires_at=timezone.now() - timedelta(seconds=1))
    assert Client().get(paths[1]).status_code == 200
    address = member.address(f"reports/{revoked.report_id}/links/{revoked.pk}/revoke")
    assert "no longer works" in member.client.post(address, follow=True).content.decode()
    answers = [Client().get(path) for path in paths]
    assert {answer.status_code for answer in answers} == {410}
    assert len({answer.content for answer in answers}) == 1
    assert ShareLink.objects.get(pk=revoked.pk).times_opened == 1


def test_permissions(member: Visitor, viewer: Visitor, stranger: Visitor, run: Run) -> None:
    make(member, [run], parts=["summary"])
    report = SharedReport.objects.get()
    posts = ("reports/new", f"reports/{report.pk}/links", f"reports/{report.pk}/delete")
    for rest in posts:
        assert viewer.client.post(viewer.address(rest), {"lifetime": "1 day"}).status_code == 403
        assert stranger.client.post(viewer.address(rest)).status_code == 404
    assert viewer.client.get(viewer.address(f"reports/{report.pk}/")).status_code == 200
    assert stranger.client.get(stranger.address(f"reports/{report.pk}/")).status_code == 404
    assert Client().get(viewer.address("reports/")).status_code == 302


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"runs": []}, "Choose at least one run."),
        ({"title": " "}, "Give the report a title"),
        ({"parts": []}, "Choose at least one part"),
        ({"parts": ["tensor"]}, "Choose the tensor"),
        ({"parts": ["tensor"], "tensor": "nowhere"}, "has no tensor of that name"),
        ({"first": "early"}, "The first step must be a whole number"),
        ({"text": "x" * 20_001}, "The text is longer than"),
    ],
)
def test_bad_requests_say_what_to_do(
    member: Visitor, run: Run, fields: dict[str, object], problem: str
) -> None:
    assert problem in make(member, [run], **fields)
    assert not SharedReport.objects.exists()


def test_a_deleted_report_ends_its_links(member: Visitor, run: Run) -> None:
    make(member, [run], parts=["summary"])
    path, report = link_of(member, "until revoked"), SharedReport.objects.get()
    member.client.post(member.address(f"reports/{report.pk}/delete"))
    assert Client().get(path).status_code == 410


def test_text_is_sanitised(member: Visitor, run: Run) -> None:
    text = "<img src=x onerror=alert(1)> [a](javascript:alert(1)) ![b](https://example.org/b.png)"
    page = make(member, [run], parts=["summary"], text=text)
    document = page.split('class="prose"')[1].split("</section>")[0]
    assert "<img" not in document and 'href="javascript' not in document


def test_runs_of_other_projects_are_ignored(member: Visitor, stranger: Visitor, run: Run) -> None:
    page = stranger.client.get(stranger.address(f"reports/new?runs={run.pk}")).content.decode()
    assert run.name not in page


def test_the_paragraph_can_be_copied_in_three_forms(viewer: Visitor, seeded: Seeded) -> None:
    page = viewer.client.get(viewer.address(f"reports/new?runs={seeded.faulty.pk}")).content.decode()
    assert "Copy as text" in page and "Copy as Markdown" in page and "Copy as LaTeX" in page
    assert "so FP8 is worse" in page or "NaN or infinite since" in page


def test_a_failed_run_is_not_called_good() -> None:
    facts = RunFacts(
        name="r_1",
        precision="FP8",
        baseline="3 BF16 runs",
        loss="It is equivalent.",
        incomplete="The run failed at step 3.",
    )
    text = paragraph(facts, "text")
    assert text.index("failed at step 3") < text.index("equivalent")
    assert r"r\_1" in paragraph(facts, "markdown") and r"r\_1" in paragraph(facts, "latex")
    assert r"50 \%" in paragraph(RunFacts(name="50 %", precision="FP8"), "latex")


def test_says_when_runs_are_left_out(member: Visitor) -> None:
    runs = Run.objects.bulk_create(
        Run(project=member.project, name=f"r {number}") for number in range(MAX_CHOSEN + 1)
    )
    query = "&".join(f"runs={each.pk}" for each in runs)
    page = member.client.get(member.address(f"reports/new?{query}")).content.decode()
    assert f"only {MAX_CHOSEN} of those chosen are taken" in page


def test_a_report_of_many_runs_has_a_line_for_each(member: Visitor, seeded: Seeded) -> None:
    more = [
        make_run(
            member.project,
            f"m {number}",
            precision="fp8",
            config={"lr": 0.1 if number < 15 else 0.2},
            seed=number,
        )
        for number in range(20)
    ]
    page = make(member, [seeded.faulty, seeded.healthy, *more])
    sections = {section["kind"]: section for section in SharedReport.objects.get().content["sections"]}
    settings = sections["runs"]
    assert len(settings["rows"]) == 22 and all(
        len(row) == 1 + len(settings["names"]) for row in settings["rows"]
    )
    differing = dict(settings["differences"])
    assert ["0.1", 15] in differing["lr"] and ["0.2", 5] in differing["lr"]
    assert "What differs in their configurations" in page and "5 runs" in page
    # The newest runs have no statistics of tensors.
    (tensors,) = (s for s in SharedReport.objects.get().content["sections"] if s["title"] == "Tensors")
    assert tensors["note"] == seeded.faulty.name and tensors["svg"]
    # Two of them have a verdict: each a paragraph.
    assert len(sections["summary"]["runs"]) == 2


def test_charts_have_the_colours_of_the_reader(member: Visitor, seeded: Seeded) -> None:
    page = make(member, [seeded.faulty, *seeded.baselines])
    stored = [s for s in SharedReport.objects.get().content["sections"] if s["kind"] == "figure"]
    assert all("var(--" not in section["svg"] for section in stored), "reports store colours"
    assert [bool(section.get("svg_dark")) for section in stored] == ["<image" in s["svg"] for s in stored]
    assert any(section.get("svg_dark") for section in stored)
    assert 'stroke="var(--bf16)"' in page and "report__in-dark" in page
    assert 'data-theme="light"' not in Client().get(link_of(member)).content.decode()


def test_a_run_without_a_baseline_says_so() -> None:
    text = paragraph(RunFacts(name="r", precision="FP8", unpaired=True, reached=500, planned=500), "text")
    assert "It was not compared with a BF16 run." in text and "for 500 steps" in text
    waiting = paragraph(
        RunFacts(name="r", precision="FP8", baseline="3 BF16 runs", reached=3, planned=500), "text"
    )
    assert (
        "not been compared with its baseline yet (3 BF16 runs)" in waiting and "3 of 500 planned" in waiting
    )
    alerts = paragraph(
        RunFacts(name="r", precision="FP8", alerts=[("Loss spike", 1), ("FP8 above baseline", 2)]), "text"
    )
    assert "loss spike, FP8 above baseline (2 times)" in alerts

"""The page of a diagnosis: its sentence, its steps, and the links to what they rest on."""

from __future__ import annotations

from dashboard.helpers.recording import make_run
from dashboard.helpers.visitors import Visitor

from fp8scope_dashboard.diagnosis.findings import EvidenceLink, Finding
from fp8scope_dashboard.diagnosis.models import Diagnosis
from fp8scope_dashboard.pages.run.diagnosis import address_of, shown_findings
from fp8scope_dashboard.runs.models import Run


def stored(run: Run) -> Diagnosis:
    scaling = Finding(
        step="scaling",
        outcome="cause",
        sentence="The scales are frozen.",
        cause="frozen_scale",
        onset=240,
        tensors=("a.input",),
        suggestion="Update them.",
        links=(
            EvidenceLink("tensor", "a.input", {"tensor": "a.input"}),
            EvidenceLink("ranks", "Ranks"),
            EvidenceLink("reports", "Reports"),
        ),
    )
    clear = Finding(step="software", outcome="clear", sentence="All versions are fine.")
    result = {
        "findings": [scaling.as_dict(), clear.as_dict()],
        "decided_by": "scaling",
        "suggestion": "Update them.",
        "onset": 240,
    }
    return Diagnosis.objects.create(
        run=run, outcome="cause", cause="frozen_scale", sentence="Frozen.", result=result, inputs="now"
    )


def test_it_works(viewer: Visitor) -> None:
    run = make_run(viewer.project, "r", precision="fp8", last_step=1_000)
    stored(run)
    page = viewer.client.get(viewer.address(f"runs/{run.id}/diagnosis/")).content.decode()
    assert "Frozen." in page and "The scales are frozen." in page and "What to do:" in page
    own = f"/p/research/runs/{run.id}/figures/tensor.json?tensor=a.input"
    assert f'id="tensor-1" data-figure="{own}"' in page
    # The charts of the run open at the onset: a twentieth of the run on each side.
    assert f"/runs/{run.id}/?steps=190..290#loss-title" in page and "Steps around 240" in page
    # A step without an onset has no such link.
    assert page.count("Steps around") == 1


def test_links_lead_to_the_part_that_has_the_evidence(viewer: Visitor) -> None:
    run = make_run(viewer.project, "r", precision="fp8", last_step=1_000)
    first, second = shown_findings(run, stored(run).result)
    own = f"/p/research/runs/{run.id}/"
    assert [link.address for link in first.evidence] == [
        f"{own}?tab=tensors&tensor=a.input",
        f"{own}?tab=ranks#ranks",
        f"{own}#reports",
        f"{own}?steps=190..290#loss-title",
    ]
    assert first.decisive and not second.evidence
    assert address_of(run, {"kind": "alerts", "parts": {}}) == f"/p/research/alerts/?run={run.id}"
    for link in first.evidence:
        assert viewer.client.get(link.address).status_code == 200

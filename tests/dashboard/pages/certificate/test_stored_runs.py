"""The certificate of stored runs: by the API and from a run's menu, with the verdict of the page."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.token_clients import client_with_token
from dashboard.helpers.visitors import Visitor, visitor_of

from fp8scope_dashboard.accounts.models import Role, Scope
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.analysis.loss_comparisons import compare
from fp8scope_dashboard.certificates.document import parse
from fp8scope_dashboard.certificates.signing import fingerprint
from fp8scope_dashboard.certificates.stored_runs import server_key
from fp8scope_dashboard.certificates.verification import verify
from fp8scope_dashboard.runs.models import Run

STEPS = 240
pytestmark = pytest.mark.django_db


def store(visitor: Visitor, group: str, seed: int, harm: float = 0.0, **fields: Any) -> Run:
    run = make_run(visitor.project, f"{group} {seed}", group=group, seed=seed, total_steps=STEPS, **fields)
    steps = np.arange(STEPS)
    shared = 0.02 * np.random.default_rng(5).normal(size=STEPS)
    own = np.random.default_rng(seed)
    level = 2.0 + 2.0 * np.exp(-steps / 30.0)
    noise = 0.001 * own.normal(size=STEPS) + 0.0003 * own.normal()
    writer = Recorder(run=run)
    writer.rows(steps, {"loss": level * (1.0 + shared + noise + harm)}, rows_per_batch=STEPS)
    writer.finish()
    return run


@pytest.fixture
def fp8(admin: Visitor) -> Run:
    """One of two FP8 runs, of a group that is 2 % above its baseline of two."""
    for seed in (11, 12):
        store(admin, "bf16", seed, precision="bf16")
    store(admin, "fp8", 2, 0.02, precision="fp8", baseline="bf16")
    return store(
        admin,
        "fp8",
        1,
        0.02,
        precision="fp8",
        baseline="bf16",
        config_digest="d1",
        environment={"torch": "2.13.0", "user": "ada", "hostname": "node7"},
    )


def test_it_works(admin: Visitor, fp8: Run) -> None:
    """The file is valid, and says what the page says."""
    comparison = compare(fp8.pk)
    assert comparison is not None and comparison.verdict == "worse"
    client = client_with_token(admin.project, Scope.READ)
    answer = client.get(f"/api/v1/runs/{fp8.pk}/certificate")
    assert answer.status_code == 200 and answer["X-Fp8scope-Outcome"] == "fail"
    document = parse(answer.content)
    claim = verify(document, signer=fingerprint(server_key())).claim
    for name in ("verdict", "measured", "delta", "interval", "tolerance", "margin", "smallest_detectable"):
        stored = comparison.verdict if name == "verdict" else comparison.result[name]
        assert claim[name] == pytest.approx(tuple(stored) if isinstance(stored, list) else stored), name
    assert [len(document["arms"][name]) for name in ("judged", "baseline")] == [2, 2]
    first = document["arms"]["judged"][0]
    assert first["id"] == str(fp8.pk) and first["facts"]["environment"] == {"torch": "2.13.0"}
    assert "ada" not in answer.content.decode() and "node7" not in answer.content.decode()


@pytest.mark.parametrize(
    ("form", "kind", "part"),
    [
        ("html", "text/html", '<h1 class="danger">FP8 is worse than BF16</h1>'),
        ("markdown", "text/markdown", "### ❌ FP8 is worse than BF16"),
        ("junit", "application/xml", '<failure message="FP8 is worse than BF16">'),
    ],
)
def test_other_forms(admin: Visitor, fp8: Run, form: str, kind: str, part: str) -> None:
    client = client_with_token(admin.project, Scope.READ)
    answer = client.get(f"/api/v1/runs/{fp8.pk}/certificate?format={form}")
    assert answer["Content-Type"].startswith(kind) and part in answer.content.decode()


def test_the_margin_and_the_baseline_can_be_chosen(admin: Visitor, fp8: Run) -> None:
    client = client_with_token(admin.project, Scope.READ)
    address = f"/api/v1/runs/{fp8.pk}/certificate"

    def claim(query: str) -> dict[str, Any]:
        claim: dict[str, Any] = client.get(f"{address}?{query}").json()["claim"]
        return claim

    assert claim("margin=0.05")["outcome"] == "pass"
    in_nats = claim("margin_nats=0.1")
    assert in_nats["outcome"] == "pass" and in_nats["margin_nats"] == 0.1
    other = store(admin, "other", 31, 0.02)
    document = client.get(f"{address}?baseline=other").json()
    assert document["names"]["baseline"] == "other"
    assert [run["id"] for run in document["arms"]["baseline"]] == [str(other.pk)]
    # Nothing of it is stored.
    fp8.refresh_from_db()
    assert (fp8.baseline, fp8.margin) == ("bf16", None)


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("margin=0", 422),
        ("margin=nan", 422),
        ("margin_nats=1e9", 422),
        ("format=pdf", 422),
        ("baseline=nothing", 409),
        ("baseline=" + "x" * 200, 422),
    ],
)
def test_wrong_requests_are_refused(admin: Visitor, fp8: Run, query: str, status: int) -> None:
    client = client_with_token(admin.project, Scope.READ)
    answer = client.get(f"/api/v1/runs/{fp8.pk}/certificate?{query}")
    assert answer.status_code == status and "error" in answer.json()


def test_only_readers_have_certificates(admin: Visitor, fp8: Run) -> None:
    """A token that only writes would read the losses of other tokens' runs in it."""
    Run.objects.filter(pk=fp8.pk).update(registered_with=None)
    writing = client_with_token(admin.project, Scope.WRITE)
    assert writing.get(f"/api/v1/runs/{fp8.pk}/certificate").status_code == 403
    elsewhere = visitor_of(create_project("elsewhere", "Elsewhere"), "eve", Role.ADMIN)
    assert (
        client_with_token(elsewhere.project, Scope.READ).get(f"/api/v1/runs/{fp8.pk}/certificate").status_code
        == 404
    )
    assert elsewhere.client.get(admin.address(f"runs/{fp8.pk}/certificate.json")).status_code == 404


def test_the_menu_of_a_run_has_it(admin: Visitor, fp8: Run) -> None:
    page = admin.client.get(admin.address(f"runs/{fp8.pk}/")).content.decode()
    assert f"runs/{fp8.pk}/certificate.html" in page and f"runs/{fp8.pk}/certificate.json" in page
    file = admin.client.get(admin.address(f"runs/{fp8.pk}/certificate.json"))
    assert file["Content-Disposition"] == f'attachment; filename="certificate-{fp8.pk}.json"'
    assert verify(parse(file.content)).claim["verdict"] == "worse"
    sheet = admin.client.get(admin.address(f"runs/{fp8.pk}/certificate.html")).content.decode()
    assert "FP8 is worse than BF16" in sheet
    alone = store(admin, "alone", 5)
    assert "certificate" not in admin.client.get(admin.address(f"runs/{alone.pk}/")).content.decode()
    answer = admin.client.get(admin.address(f"runs/{alone.pk}/certificate.json"), follow=True)
    assert "There is no certificate: the run has no baseline" in answer.content.decode()
    assert admin.client.get(admin.address(f"runs/{uuid.uuid4()}/certificate.json")).status_code == 404

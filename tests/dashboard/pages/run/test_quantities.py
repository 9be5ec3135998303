"""Costs and savings on the compare page, the run's page and in the API."""

from __future__ import annotations

from typing import Any

from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor

from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.analysis.models import Comparison
from fp8scope_dashboard.analysis.quantities.result import METHOD_VERSION
from fp8scope_dashboard.pages.run.quantities import quantity_rows


def test_it_works(viewer: Visitor, seeded: Seeded) -> None:
    result = Comparison.objects.get(run=seeded.healthy).result["quantities"]
    assert result["headline"].startswith("FP8 ") and result["method_version"] == METHOD_VERSION
    compare = viewer.client.get(viewer.address("compare/"), {"runs": str(seeded.healthy.id)}).content.decode()
    head = viewer.client.get(viewer.address(f"runs/{seeded.healthy.id}/")).content.decode()
    assert result["headline"] in compare and result["headline"] in head
    # The verdict on the loss comes first.
    explanation = Comparison.objects.get(run=seeded.healthy).result["explanation"][:40]
    assert compare.index(explanation) < compare.index(result["headline"])
    assert "Costs and savings" in compare and "Throughput" in compare and "Time to the same loss" in compare
    token = create_token(viewer.project, "tests", scopes=("write", "read"))[1]
    answer = viewer.client.get(
        f"/api/v1/runs/{seeded.healthy.id}", headers={"authorization": f"Bearer {token}"}
    ).json()
    assert answer["comparison"]["quantities"] == result


def test_a_run_without_a_result_shows_nothing(viewer: Visitor, seeded: Seeded) -> None:
    Comparison.objects.filter(run=seeded.healthy).delete()
    answer = viewer.client.get(viewer.address("compare/"), {"runs": str(seeded.healthy.id)})
    assert answer.status_code == 200 and "Costs and savings" not in answer.content.decode()
    answer = viewer.client.get(viewer.address(f"runs/{seeded.baselines[0].id}/"))
    assert answer.status_code == 200 and 'class="headline"' not in answer.content.decode()


def test_rows_say_why_a_quantity_is_missing() -> None:
    missing: dict[str, Any] = {"interval": None, "n": 0}
    rows = quantity_rows(
        {
            "net": None,
            "throughput": {"ratio": 1.31, "interval": [1.29, 1.33], "n": 9, "explanation": "Why."},
            "tokens_cost": {
                "delta": 0.004,
                "interval": [0.001, 0.007],
                "axis": "steps",
                "explanation": "A. B.",
            },
            "memory": {"ratio": None, "explanation": "No device.", **missing},
            "time_to_loss": {
                "ratio": 1.29,
                "interval": [1.2, 1.4],
                "explanation": "D.",
                "loss": 3.21,
                "seconds": 14_760.0,
                "baseline_seconds": 19_080.0,
            },
            "gradient_norm": {"delta": -0.01, "interval": [-0.02, 0.0], "n": 9, "explanation": "C."},
        }
    )
    assert [(row.term, row.value, row.explanation) for row in rows] == [
        ("throughput_ratio", "1.31\u202f× (1.29 to 1.33)", "Why."),
        ("tokens_cost", "0.4\u202f% (0.1 to 0.7) more steps", "B."),
        (
            "time_to_loss",
            "4\u202fh 6\u202fmin against 5\u202fh 18\u202fmin: 1.29\u202f× (1.20 to 1.40)",
            "Training time until a loss of 3.21. D.",
        ),
        ("memory_ratio", "", "No device."),
        ("gradient_norm_delta", "−1.00\u202f% (−2.00\u202f% to ±0\u202f%)", "C."),
    ]
    assert quantity_rows({}) == []

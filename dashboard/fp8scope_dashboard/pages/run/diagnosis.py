"""A stored diagnosis, prepared for the page: badges, and addresses of the evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from django.urls import reverse

from fp8scope_dashboard.pages.badges import Badge
from fp8scope_dashboard.pages.formatting import written
from fp8scope_dashboard.pages.run.onset_strip import steps_around
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.text.onsets import steps_in_words

STEPS: Final[Mapping[str, tuple[str, str]]] = {
    "baseline": ("The baseline", "Whether the BF16 runs are healthy, so that they can be compared with."),
    "reference": ("Is it FP8?", "Compares spikes and rises of the loss with the BF16 runs."),
    "software": ("Software", "Versions with known faults, and versions that differ between ranks."),
    "optimizer": ("Optimizer", "Weights that leap, a broken state of the optimizer, and growth."),
    "scaling": ("Scaling", "Whether each scale follows its amax, and which tensors leave their range first."),
    "product": ("One product", "The latest bisection of the matrix products."),
    "evaluation": ("Evaluation", "The precision and the number of evaluations."),
}
"""Title and purpose of each step."""

OUTCOMES: Final[Mapping[str, Badge]] = {
    "cause": Badge("Cause", "danger", "cross"),
    "not_fp8": Badge("Not FP8", "warning", "flag"),
    "suspect": Badge("Possible cause", "warning", "alert"),
    "effect": Badge("Effect", "neutral", "flag"),
    "clear": Badge("Clear", "neutral", "check"),
    "unknown": Badge("No data", "neutral", "question"),
}


@dataclass(frozen=True)
class ShownLink:
    """A link of a finding."""

    label: str
    address: str


@dataclass(frozen=True, kw_only=True)
class ShownFinding:
    """A step of the diagnosis on the page."""

    title: str
    purpose: str
    badge: Badge
    sentence: str
    suggestion: str
    evidence: list[ShownLink]
    decisive: bool


@dataclass(frozen=True)
class TensorChart:
    """The chart of a tensor on the page: its element's id, and where its data is."""

    name: str
    id: str
    address: str


def shown_findings(run: Run, result: Mapping[str, Any]) -> list[ShownFinding]:
    """The findings of a stored result in the order of the steps."""
    return [
        ShownFinding(
            title=STEPS[finding["step"]][0],
            purpose=STEPS[finding["step"]][1],
            badge=OUTCOMES[finding["outcome"]],
            sentence=finding["sentence"],
            suggestion=finding["suggestion"],
            evidence=[
                *(ShownLink(link["label"], address_of(run, link)) for link in finding["links"]),
                *_steps_around(run, finding),
            ],
            decisive=finding["step"] == result["decided_by"],
        )
        for finding in result["findings"]
    ]


def after_of(finding: Mapping[str, Any]) -> int | None:
    """The last step before the onset of a stored finding that was looked at; None if it is not known."""
    earliest = finding.get("earliest")
    return None if earliest is None else int(earliest) - 1


def _steps_around(run: Run, finding: Mapping[str, Any]) -> list[ShownLink]:
    """A link to the charts of the run, at the steps around the onset of a finding."""
    onset = finding.get("onset")
    if onset is None:
        return []
    after = after_of(finding)
    first, last = steps_around(onset if after is None else after + 1, onset, run.last_step)
    page = reverse("run", args=[run.project.slug, run.pk])
    label = f"Steps around {written(steps_in_words(onset, after))}"
    return [ShownLink(label, f"{page}?steps={first}..{last}#loss-title")]


def address_of(run: Run, link: Mapping[str, Any]) -> str:
    """The address of a finding's link."""
    slug, parts, page = run.project.slug, link["parts"], reverse("run", args=[run.project.slug, run.pk])
    match link["kind"]:
        case "tensor":
            # The tab of tensors opens the tensor beside the map of the statistic.
            shown = {"tab": "tensors", "tensor": parts["tensor"]}
            if statistic := parts.get("statistic"):
                shown["tensors.statistic"] = statistic
            return f"{page}?{urlencode(shown)}"
        case "run":
            return reverse("run", args=[slug, parts["run"]]) if parts.get("run") else page
        case "compare":
            return f"{page}#loss-title"
        case "evaluations":
            return reverse("evaluations", args=[slug])
        case "alerts":
            return f"{reverse('alerts', args=[slug])}?run={run.pk}"
        case "reports":
            return f"{page}#reports"
        case "ranks":
            return f"{page}?tab=ranks#ranks"
        case _:
            return str(parts.get("address", page))


def tensors_to_draw(result: Mapping[str, Any], most: int = 2) -> list[str]:
    """The tensors of the decisive finding, those that began first."""
    decisive = [finding for finding in result["findings"] if finding["step"] == result["decided_by"]]
    return [name for finding in decisive for name in finding["tensors"]][:most]


def tensor_charts(run: Run, names: Sequence[str]) -> list[TensorChart]:
    """The charts of tensors, in their order."""
    page = reverse("figure", args=[run.project.slug, run.pk, "tensor"])
    return [
        TensorChart(name, f"tensor-{number}", f"{page}?{urlencode({'tensor': name})}")
        for number, name in enumerate(names, 1)
    ]

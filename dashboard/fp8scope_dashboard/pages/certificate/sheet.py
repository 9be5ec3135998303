"""A certificate as one page of HTML that needs no server: no script, no address, print it to have a PDF."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from django.template import Context, Engine
from django.utils.safestring import mark_safe

from fp8scope_dashboard.certificates.claim import Terms, compared
from fp8scope_dashboard.certificates.gate import facts_of, title_of
from fp8scope_dashboard.certificates.members import Member, from_document
from fp8scope_dashboard.certificates.signing import check_signature
from fp8scope_dashboard.pages.charts.svg import svg_of
from fp8scope_dashboard.pages.charts.theme import theme_named
from fp8scope_dashboard.pages.compare.delta_figure import DeltaCurve, delta_figure
from fp8scope_dashboard.text.numbers import MINUS

WIDTH: Final = 760
TEMPLATES: Final = Path(__file__).parents[1] / "templates" / "pages" / "certificate"
MAX_RUNS_SHOWN: Final = 64
TONES: Final = {"pass": "good", "fail": "danger", "undecided": "neutral"}


def sheet(document: Mapping[str, Any]) -> str:
    """Return the page of a certificate, whose signature is checked again.

    Raises CertificateError if it was changed after it was signed.
    """
    signer = check_signature(dict(document))
    claim = document["claim"]
    context = {
        "title": title_of(claim),
        "tone": TONES[claim["outcome"]],
        "explanation": _written(claim["explanation"]),
        "reason": _written(claim["reason"]),
        "facts": [(name, _written(value)) for name, value in facts_of(document)],
        "looks": claim["looks"],
        "not_judged": claim["not_judged"],
        "warnings": claim["warnings"],
        "arms": [
            {"title": title, "runs": [_run(run) for run in document["arms"][name]]}
            for title, name in (("Judged", "judged"), ("Baseline", "baseline"))
        ],
        "chart": mark_safe(_chart(document)),
        "made_at": document["made_at"],
        "fp8scope": document["fp8scope"],
        "server": document["names"]["server"],
        "signer": signer,
    }
    # An engine of its own: the command has no settings of Django.
    engine = Engine(dirs=[str(TEMPLATES)], autoescape=True)
    return engine.get_template("sheet.html").render(Context(context, use_l10n=False, use_tz=False))


def _written(text: str) -> str:
    """A text with the minus signs of print."""
    return re.sub(r"(?<![\w-])-(?=\d)", MINUS, str(text))


def _run(run: Mapping[str, Any]) -> dict[str, str]:
    facts = run["facts"]
    versions: list[tuple[str, Any]] = sorted(dict(facts.get("environment") or {}).items())
    return {
        "name": run["name"],
        "seed": "" if facts.get("seed") is None else str(facts["seed"]),
        "state": run["state"],
        "points": f"{run['points']:,}",
        "configuration": str(facts.get("config_digest") or "")[:16],
        "data": str(run["sha256"].get("data_hash", ""))[:16],
        "loss": str(run["sha256"]["losses"])[:16],
        "environment": ", ".join(f"{name} {value}" for name, value in versions if value)[:200],
    }


def _chart(document: Mapping[str, Any]) -> str:
    """The difference over the run, with its interval, as the page *Compare* draws it."""
    ours, theirs = (_members(document, name) for name in ("judged", "baseline"))
    result = compared(ours, theirs, Terms.from_dict(document["terms"]))
    if not result.curve or not result.curve["x"]:
        return ""
    x, delta, low, high = (np.array(result.curve[name]) for name in ("x", "delta", "low", "high"))
    curve = DeltaCurve(
        name=document["names"]["judged"],
        slot="fp8-1",
        x=x,
        delta=delta,
        low=low,
        high=high,
        tolerance=result.tolerance,
        window=result.window,
    )
    theme = theme_named("light")
    is_nats = result.unit == "nats"
    figure = delta_figure([curve], result.margin, theme, x_title=result.aligned_on, nats=is_nats)
    return svg_of(figure, theme, width=WIDTH) or ""


def _members(document: Mapping[str, Any], name: str) -> list[Member]:
    return [from_document(run) for run in document["arms"][name]]

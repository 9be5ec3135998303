"""Runs every check on a recorded run, and tells its findings to people."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fp8scope.advice.checks import CHECKS
from fp8scope.advice.finding import AdviceFinding, percent
from fp8scope.advice.record import RunRecord

WIDTH = 100


def advise(run: RunRecord) -> list[AdviceFinding]:
    """Return what the checks find in a run, the largest expected gain first."""
    findings = [finding for check in CHECKS.values() if (finding := check(run)) is not None]
    return sorted(findings, key=lambda finding: -finding.gain.high)


def document(run: RunRecord, findings: Sequence[AdviceFinding]) -> dict[str, Any]:
    """Return the findings as JSON for the server, with the steps that they were judged by."""
    return {
        "steps": len(run.first.seconds),
        "step_seconds": round(float(run.first.seconds.mean()), 6),
        "findings": [asdict(finding) for finding in findings],
    }


def as_text(run: RunRecord, findings: Sequence[AdviceFinding]) -> str:
    """Return the findings for a terminal."""
    steps = len(run.first.seconds)
    if not run.first.is_measured:
        return f"{steps} measured steps are too few for advice."
    step = 1000 * float(run.first.seconds.mean())
    lines = [f"{steps} steps of {step:.1f} ms on {len(run.ranks)} of {run.world_size} ranks."]
    if not findings:
        lines.append("No check of the twelve practices finds anything.")
    for number, finding in enumerate(findings, 1):
        gain = finding.gain
        lines += [
            "",
            f"{number}. {finding.title} [{finding.practice}]",
            *_paragraph("evidence", finding.evidence),
            *_paragraph("gain", f"{percent(gain.low)} to {percent(gain.high)} of the time: {gain.formula}."),
            *_paragraph("change", finding.change),
        ]
    return "\n".join(lines)


def _paragraph(label: str, text: str) -> list[str]:
    return textwrap.wrap(f"{label + ':':<10}{text}", WIDTH, initial_indent="   ", subsequent_indent=" " * 13)

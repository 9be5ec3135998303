"""The rule that people write themselves."""

from __future__ import annotations

from fp8scope_dashboard.alerts.kinds.base import KindDefinition, Parameter, points

THRESHOLD = KindDefinition(
    name="threshold",
    severity="warning",
    description="A rule of your own: a statistic, a condition and a value.",
    parameters={
        "value": Parameter(0.0, -1e100, 1e100, "The limit. A factor must be above 1."),
        "points": Parameter(3, 1, 1_000, "Observations over which the condition must hold.", whole=True),
        "share": Parameter(1.0, 0.01, 1.0, "Share of them in which it must hold. 1: all, in a row."),
        "window": Parameter(
            50,
            2,
            100_000,
            "Observations over which the average is taken that 'rises', 'falls' and 'changes' compare with.",
            whole=True,
        ),
        "recover": points(10, "Observations in a row without the condition that end it."),
    },
    names_tensors=True,
    is_default=False,
)

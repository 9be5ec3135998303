"""Rules for the scalars of a training, and for the run itself."""

from __future__ import annotations

from fp8scope_dashboard.alerts.kinds.base import KindDefinition, Parameter, points

GRAD_NORM = KindDefinition(
    name="grad_norm",
    severity="warning",
    description="The gradient norm is far above its own past, or not finite, for several steps in a row.",
    parameters={
        "z": Parameter(8.0, 3.0, 100.0, "Mean absolute deviations of its logarithm above the average."),
        "factor": Parameter(4.0, 1.01, 1e6, "Least rise, as a factor."),
        "span": points(1, "Points over which the norm is averaged before it is compared."),
        "window": points(200, "Points that the past reaches back, and before anything is judged."),
        "points": points(5, "Points in a row that must be that high."),
        "recover": points(20, "Points in a row below the limit that end it."),
    },
    shows="grad_norm",
)
THROUGHPUT_DROP = KindDefinition(
    name="throughput_drop",
    severity="warning",
    description="Steps take much longer than before.",
    parameters={
        "z": Parameter(3.0, 1.0, 100.0, "Mean absolute deviations of the logarithm above the average."),
        "factor": Parameter(1.3, 1.01, 1e6, "Least slowdown, as a factor."),
        "span": points(20, "Steps over which the time is averaged before it is compared."),
        "window": points(200, "Steps that the past reaches back, and before anything is judged."),
        "points": points(30, "Steps in a row that must be that slow."),
        "recover": points(30, "Steps in a row below the limit that end it."),
    },
    shows="step_seconds",
)
DATA_WAIT = KindDefinition(
    name="data_wait",
    severity="warning",
    description="Steps wait for data for a large share of their time.",
    parameters={
        "share": Parameter(0.3, 0.0, 1.0, "Time of the wait over that of the step."),
        "points": points(50, "Steps over which the share is averaged."),
        "recover": points(50, "Steps in a row below the limit that end it."),
    },
    shows="time_data",
)
MEMORY_CREEP = KindDefinition(
    name="memory_creep",
    severity="warning",
    description="The memory in use rises steadily.",
    parameters={
        "points": points(60, "Readings of a block; the agent reads once a second."),
        "blocks": Parameter(10, 2, 10_000, "Blocks in a row that rise.", whole=True),
        "rise": Parameter(0.1, 0.0, 100.0, "Least rise over these blocks, relative to the first."),
    },
    shows="memory_rss",
)
RANK_BEHIND = KindDefinition(
    name="rank_behind",
    severity="warning",
    description="A rank has not reached the step that the others were at some time ago.",
    parameters={"seconds": Parameter(60.0, 5.0, 86_400.0, "How long the others must have been there.")},
)
RUN_SILENT = KindDefinition(
    name="run_silent",
    severity="critical",
    description="No process of the run has been heard from for a minute.",
    parameters={},
)
RUN_FAILED = KindDefinition(
    name="run_failed",
    severity="critical",
    description="A process of the run ended with an error.",
    parameters={},
)
RUN_FINISHED = KindDefinition(
    name="run_finished", severity="warning", description="The run has finished.", parameters={}, enabled=False
)

RUN_KINDS = (
    GRAD_NORM,
    THROUGHPUT_DROP,
    DATA_WAIT,
    MEMORY_CREEP,
    RANK_BEHIND,
    RUN_SILENT,
    RUN_FAILED,
    RUN_FINISHED,
)

"""A section for the model card of a run's model: what was measured, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fp8scope_dashboard.pages.formatting import difference
from fp8scope_dashboard.pages.hours.usage import gpus_of, usage_of_run
from fp8scope_dashboard.pages.hours.wording import hours
from fp8scope_dashboard.pages.run.facts import recipe_in_words, run_facts
from fp8scope_dashboard.pages.run.summary import ShownVerdict, baseline_groups, verdict_of
from fp8scope_dashboard.runs.models import Run, Tensor
from fp8scope_dashboard.runs.services import page_url
from fp8scope_dashboard.text.numbers import count, level
from fp8scope_dashboard.text.run_summary import escaped_markdown, paragraph

FORMATS_SHOWN: Final = 8
LIBRARIES: Final = ("torch", "transformer_engine", "torchao", "triton", "fp8scope", "cuda", "rocm")


def model_card(run: Run, server: str) -> str:
    """The section as Markdown. Its sentences and numbers are those of the run's page.

    `run` has its project and comparison; `server` is the address that links begin with. Rows of what was not
    measured are left out, but for the verdict: its row then says why there is none.
    """
    rows = [f"| {title} | {escaped_markdown(value)} |" for title, value in _rows(run) if value]
    return "\n".join(
        [
            "## Training precision",
            "",
            paragraph(run_facts(run), "markdown"),
            "",
            "| | |",
            "|---|---|",
            *rows,
            "",
            f"[The run in fp8scope]({page_url(run, server)})",
            "",
        ]
    )


def _rows(run: Run) -> Iterator[tuple[str, str]]:
    verdict = verdict_of(run, baseline_groups(run.project_id))
    yield "Precision", run.precision if run.precision != "unknown" else ""
    yield "Recipe", recipe_in_words(run.recipe)
    yield "Formats", _formats(run)
    yield "Kernels", _kernels(run)
    yield "Against BF16", verdict.badge.label if verdict.verdict else f"not judged: {verdict.explanation}"
    yield from _difference(run, verdict)
    yield "Hardware", _hardware(run)
    usage = usage_of_run(run)
    yield "GPU hours" if gpus_of(run) else "Hours", "" if usage is None else hours(usage.seconds)


def _difference(run: Run, verdict: ShownVerdict) -> Iterator[tuple[str, str]]:
    """The difference of the loss, with all that says how far it can be trusted."""
    if verdict.delta is None:
        return
    text = difference(verdict.delta, verdict.unit, signed=True)
    if verdict.interval is not None:
        low, high = (difference(end, verdict.unit, signed=True) for end in verdict.interval)
        text += f" ({level(1.0 - run.project.alpha)} interval {low} to {high})"
    yield "Difference of the loss", text
    if verdict.margin is not None:
        yield "Margin", f"±{difference(verdict.margin, verdict.unit)}"
    yield "Runs", f"{count(verdict.runs, 'run')} against {count(verdict.seeds, 'baseline run')}"
    if verdict.smallest_detectable is not None:
        yield "Smallest visible difference", difference(verdict.smallest_detectable, verdict.unit)
    yield "Judged", verdict.coverage
    yield "Not judged", verdict.reason


def _formats(run: Run) -> str:
    """The formats of the observed tensors by role, e.g. `input, weight: e4m3`."""
    roles: dict[str, set[str]] = {}
    listed = Tensor.objects.filter(run=run).exclude(format="").order_by()
    for form, role in listed.values_list("format", "role").distinct():
        roles.setdefault(form, set()).add(role or "tensor")
    parts = [f"{', '.join(sorted(names))}: {form}" for form, names in sorted(roles.items())]
    return "; ".join(parts[:FORMATS_SHOWN])


def _kernels(run: Run) -> str:
    """The libraries of the training, and how many of its FP8 products ran on FP8 units, where it said so."""
    versions = [f"{name} {run.environment[name]}" for name in LIBRARIES if run.environment.get(name)]
    training = run.environment.get("training")
    units = training.get("fp8_units") if isinstance(training, dict) else None
    if isinstance(units, dict) and units.get("products"):
        versions.append(f"{units.get('on_units', 0)} of {units['products']} FP8 products on FP8 units")
    return ", ".join(map(str, versions))[:500]


def _hardware(run: Run) -> str:
    name, number = str(run.environment.get("gpu") or ""), gpus_of(run)
    return f"{number} × {name}"[:200] if name and number else ""

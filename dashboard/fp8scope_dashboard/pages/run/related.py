"""The runs that a run belongs to, for its page.

Baseline, seed group, the run before it, and those after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from django.db.models import Max

from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.analysis.baseline_choice import current_choices
from fp8scope_dashboard.analysis.suggestions import (
    SuggestedGroup,
    Suggestion,
    suggested_baseline,
    suggested_group,
)
from fp8scope_dashboard.runs.models import Choice, Relation, Run

# Groups and runs that the form offers; the newest, if there are more.
MAX_GROUPS = 200
MAX_RUNS = 100
MAX_SEEDS = 32

FROM = {Relation.RESUMED: "Resumed from", Relation.REFERENCE: "Reference window of"}
TO = {Relation.RESUMED: "Resumed by", Relation.REFERENCE: "Reference window"}


@dataclass(frozen=True)
class RelatedLink:
    """A related run, or the text of a parent that is not stored."""

    relation: str
    run: Run | None
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class RelatedRuns:
    """The related runs of a run, and what is suggested."""

    baseline: str
    choice: Choice | None = None
    # The baseline that the training script names, if a person has chosen another.
    overruled: str = ""
    suggestion: Suggestion | None = None
    group_choice: Choice | None = None
    suggested_group: SuggestedGroup | None = None
    links: list[RelatedLink] = field(default_factory=list)
    seeds: list[Run] = field(default_factory=list)


def related_runs_of(run: Run) -> RelatedRuns:
    """Return what the card of a run shows. The number of queries is bounded, and so is what they read."""
    choices = current_choices(run)
    choice = choices.get(Choice.Field.BASELINE)
    differs = choice is not None and run.agent_baseline != run.baseline
    return RelatedRuns(
        baseline=comparison_runs.baseline_label(run),
        choice=choice,
        overruled=run.agent_baseline if differs else "",
        suggestion=suggested_baseline(run) if choice is None else None,
        group_choice=choices.get(Choice.Field.GROUP),
        suggested_group=suggested_group(run),
        links=links_of(run),
        seeds=comparison_runs.siblings(run)[-MAX_SEEDS:],
    )


def links_of(run: Run) -> list[RelatedLink]:
    """The run that a run comes from, and those that come from it."""
    links = []
    if run.parent:
        parent = comparison_runs.parent_of(run)
        links.append(RelatedLink(FROM.get(Relation(run.relation or "resumed"), ""), parent, run.parent))
    for child in comparison_runs.children_of(run):
        links.append(RelatedLink(TO.get(Relation(child.relation or "resumed"), ""), child))
    return links


def offered_groups(run: Run) -> list[str]:
    """The groups that can be the baseline of a run, the newest first."""
    runs = Run.objects.filter(project_id=run.project_id).exclude(group__in=("", run.group)).order_by()
    newest = runs.values_list("group").annotate(newest=Max("created_at")).order_by("-newest", "group")
    return [group for group, _ in newest[:MAX_GROUPS]]


def offered_runs(run: Run) -> list[Run]:
    """Runs that can be the baseline of a run, the newest first; without those of its own group."""
    runs = Run.objects.filter(project_id=run.project_id).exclude(pk=run.pk).only("id", "name", "precision")
    if run.group:
        runs = runs.exclude(group=run.group)
    return list(runs.order_by("-created_at", "id")[:MAX_RUNS])

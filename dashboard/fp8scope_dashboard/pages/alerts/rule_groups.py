"""The rules of a project in groups, by what they watch, and a search in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fp8scope_dashboard.alerts.models import Channel, Rule, RuleKind
from fp8scope_dashboard.pages.alerts.rule_words import describe
from fp8scope_dashboard.pages.formatting import count

OWN: Final = "own"
MAX_SEARCH: Final = 200
TITLES: Final[Mapping[str, str]] = {
    OWN: "Your rules",
    "loss": "Loss and gradients",
    "range": "Range of tensors",
    "scales": "Scaling factors",
    "early": "Early signs",
    "speed": "Speed and memory",
    "end": "End of a run",
}
"""The titles of the groups, in the order of the page."""
GROUP_OF: Final[Mapping[str, str]] = {
    RuleKind.THRESHOLD: OWN,
    RuleKind.LOSS_NOT_FINITE: "loss",
    RuleKind.LOSS_SPIKE: "loss",
    RuleKind.LOSS_DIVERGENCE: "loss",
    RuleKind.ABOVE_BASELINE: "loss",
    RuleKind.GRAD_NORM: "loss",
    RuleKind.TENSOR_NOT_FINITE: "range",
    RuleKind.SATURATION_RATE: "range",
    RuleKind.SATURATION_RISE: "range",
    RuleKind.UNDERFLOW_RATE: "range",
    RuleKind.UNDERFLOW_RISE: "range",
    RuleKind.SCALE_FROZEN: "scales",
    RuleKind.SCALE_STALE: "scales",
    RuleKind.SCALE_JUMP: "scales",
    RuleKind.SCALE_DISAGREEMENT: "scales",
    RuleKind.AMAX_GROWTH: "early",
    RuleKind.NOISE_GROWTH: "early",
    RuleKind.KURTOSIS_GROWTH: "early",
    RuleKind.LOGIT_GROWTH: "early",
    RuleKind.ROUTER_COLLAPSE: "early",
    RuleKind.UPDATE_GROWTH: "early",
    RuleKind.THROUGHPUT_DROP: "speed",
    RuleKind.DATA_WAIT: "speed",
    RuleKind.MEMORY_CREEP: "speed",
    RuleKind.RANK_BEHIND: "speed",
    RuleKind.RUN_SILENT: "end",
    RuleKind.RUN_FAILED: "end",
    RuleKind.RUN_FINISHED: "end",
}


@dataclass(frozen=True, kw_only=True)
class ListedRule:
    """A rule in the list, in words."""

    rule: Rule
    words: str
    channels: Sequence[Channel]

    @property
    def text(self) -> str:
        """Return what a search looks at: all that the list shows, and the names in a document of the rule."""
        rule = self.rule
        run = rule.run.name if rule.run is not None else ""
        names = (TITLES[GROUP_OF[rule.kind]], rule.title, rule.kind, rule.statistic, rule.tensors, run)
        states = (str(rule.get_severity_display()), "" if rule.enabled else "off")
        return " ".join(
            (*names, *states, self.words, *(channel.name for channel in self.channels))
        ).casefold()


@dataclass(frozen=True, kw_only=True)
class RuleGroup:
    """Rules that watch the same. `remark` counts them."""

    name: str
    title: str
    rules: Sequence[ListedRule]
    remark: str


def groups_of(rules: Iterable[Rule], search: str) -> list[RuleGroup]:
    """The rules in which every word of a search occurs, in groups that are not empty."""
    words = search.casefold().split()
    listed = [
        ListedRule(rule=rule, words=describe(rule), channels=list(rule.channels.all())) for rule in rules
    ]
    matching = [entry for entry in listed if all(word in entry.text for word in words)]
    groups = []
    for name, title in TITLES.items():
        entries = [entry for entry in matching if GROUP_OF[entry.rule.kind] == name]
        if entries:
            groups.append(RuleGroup(name=name, title=title, rules=entries, remark=_counted(entries)))
    return groups


def _counted(entries: Sequence[ListedRule]) -> str:
    off = sum(not entry.rule.enabled for entry in entries)
    rules = f"{count(len(entries))} rule{'' if len(entries) == 1 else 's'}"
    return f"{rules}, {count(off)} off" if off else rules

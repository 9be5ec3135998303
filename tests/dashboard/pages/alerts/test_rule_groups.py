"""The list of rules: its groups, and the search in them."""

from __future__ import annotations

import re

from dashboard.helpers.alerting import make_hook
from dashboard.helpers.recording import make_run
from dashboard.helpers.visitors import Visitor, html

from fp8scope_dashboard.alerts.models import Rule, RuleKind
from fp8scope_dashboard.pages.alerts.rule_groups import GROUP_OF, TITLES, groups_of


def custom(visitor: Visitor, name: str, **fields: str) -> Rule:
    numbers = {"value": 8.0, "points": 20, "share": 1.0, "window": 2000, "recover": 5}
    return Rule.objects.create(
        project=visitor.project, kind=RuleKind.THRESHOLD, name=name, condition="above", parameters=numbers,
        **{"statistic": "amax", "tensors": "blocks.*.input", **fields},
    )  # fmt: skip


def titles(page: str) -> list[str]:
    return re.findall(r'<h2 id="rules-\w+">([^<]+)</h2>', page)


def listed(page: str) -> list[str]:
    return re.findall(r'href="/p/[\w-]+/rules/(\d+)/"', page)


def test_it_works(member: Visitor) -> None:
    """Every rule is in the page once, below what it watches."""
    custom(member, "Late outliers")
    run = make_run(member.project, "one run")
    Rule.objects.create(
        project=member.project, kind=RuleKind.LOSS_SPIKE, run=run, parameters={}, enabled=False
    )
    page = html(member, "rules/")
    assert titles(page) == list(TITLES.values())
    assert sorted(listed(page), key=int) == [
        str(pk)
        for pk in Rule.objects.filter(project=member.project).order_by("pk").values_list("pk", flat=True)
    ]
    loss = page.partition('id="rules-loss"')[2].partition('id="rules-range"')[0]
    assert "Loss spike" in loss and "only one run" in loss and "Frozen scale" not in loss
    assert re.search(r"\d+ rules, \d+ off", loss)


def test_every_kind_is_in_a_group() -> None:
    assert set(GROUP_OF) == set(RuleKind.values) and set(GROUP_OF.values()) == set(TITLES)


def test_the_search(member: Visitor) -> None:
    rule = custom(member, "Late outliers")
    rule.channels.add(make_hook(member.project, "on-call"))
    for search in ("OUTLIERS amax blocks", "blocks.*", "on-call", "your rules late", "critical late"):
        assert listed(html(member, f"rules/?q={search}")) == [str(rule.pk)], search
    scales = html(member, "rules/?q=scale stale")
    assert titles(scales) == ["Scaling factors"] and 'value="scale stale"' in scales
    Rule.objects.filter(project=member.project, kind=RuleKind.DATA_WAIT).update(enabled=False)
    assert "Wait for data" in html(member, "rules/?q=off wait")
    assert titles(html(member, "rules/?q=%20")) == titles(html(member, "rules/"))


def test_a_search_that_matches_nothing_says_so(member: Visitor) -> None:
    page = html(member, "rules/?q=<b>")
    assert titles(page) == [] and "None of the rules has “&lt;b&gt;” in what it says." in page
    assert "No rules of your own" not in page and "No rules of your own" in html(member, "rules/")
    assert len(html(member, f"rules/?q={'x' * 5_000}")) < len(html(member, "rules/"))


def test_answers_the_search_with_the_groups_alone(member: Visitor) -> None:
    answer = member.client.get(member.address("rules/?q=spike"), headers={"HX-Target": "rule-groups"})
    part = answer.content.decode()
    assert "<main" not in part and titles(part) == ["Loss and gradients"]


def test_groups_without_rules_are_left_out() -> None:
    assert groups_of([], "") == []

"""The amounts that the tokens of a project have sent in the present windows, against their quotas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import redis

from fp8scope_dashboard.accounts.models import ApiToken, Project
from fp8scope_dashboard.edge.quotas import QUOTAS, Quota, counts
from fp8scope_dashboard.pages import formatting


@dataclass(frozen=True, kw_only=True)
class Use:
    """The use of one quota, in words. `percent` is of the project's, 0 to 100; 0 without a limit."""

    label: str
    used: str
    limit: str
    percent: float
    busiest: str
    token_limit: str


def quota_use(project: Project, tokens: Iterable[ApiToken]) -> list[Use] | None:
    """One row for each quota, of the project and the tokens that work; None if Redis does not answer."""
    live = {f"token:{token.pk}": token.name for token in tokens}
    whole = f"project:{project.pk}"
    try:
        used = counts.used([whole, *live])
    except redis.RedisError:
        return None
    rows = []
    for name, quota in QUOTAS.items():
        amounts = {token: used[token, name] for token in live}
        most = max(amounts, key=amounts.__getitem__, default=None)
        amount = 0 if most is None else amounts[most]
        busiest = f"{live[most]}: {_amount(quota, amount)}" if most is not None and amount else ""
        share = 100 * used[whole, name] / quota.project if quota.project else 0.0
        rows.append(
            Use(
                label=f"{quota.label[0].upper()}{quota.label[1:]} {quota.per}",
                used=_amount(quota, used[whole, name]),
                limit=_amount(quota, quota.project) if quota.project else "no limit",
                percent=min(100.0, share),
                busiest=busiest,
                token_limit=_amount(quota, quota.token) if quota.token else "no limit",
            )
        )
    return rows


def _amount(quota: Quota, number: int) -> str:
    return formatting.size(number) if quota.name == "bytes" else formatting.count(number)

"""Every page of the dashboard, and the states of pages that are worth seeing, by the names in urls.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from fp8scope_dashboard.accounts.urls import urlpatterns as account_addresses
from fp8scope_dashboard.pages.run.tabs import TABS
from fp8scope_dashboard.pages.urls import urlpatterns as page_addresses

ROUTES: Final = {str(each.name): str(each.pattern) for each in (*account_addresses, *page_addresses)}
PAGES: Final[dict[str, dict[str, str]]] = {
    "home": {"": ""},
    "project": {
        "": "",
        "grouped": "?by=config.model.depth&open=config.model.depth:24",
        "with columns": "?col=state&col=config.model.depth&col=scalar.grad_norm&col=recipe",
        "with problems": "?q=color:red loss<abc",
        "without a match": "?q=nothing",
    },
    "run": {
        "": "",
        **{name: f"?tab={name}" for name in TABS if name != "overview"},
        "with a drawer": "?tensor=0",
        "with a range": "?steps=40..60",
    },
    "run_charts": {"": "", "of a search": "?q=precision:fp8", "without a match": "?q=nothing"},
    "panel_form": {"": "?metric=loss"},
    "step_note": {"": "?step=5"},
    "run_data": {"": ""},
    "diagnosis": {"": ""},
    "readiness": {"": ""},
    "tensor": {"": ""},
    "compare": {"": "?{chosen}", "of many runs": "?q=fp8", "without runs": "?q=nothing"},
    "media": {"": "?{chosen}", "that are images": "?{chosen}&name=attention", "without runs": ""},
    "compare_configuration": {"": "?{chosen}", "with equal entries": "?{chosen}&everything=1"},
    "fleet": {"": "", "with costs": "?price=2.50", "with a wrong price": "?price=much"},
    "evaluations": {"": ""},
    "alerts": {
        "": "?state=all",
        "of a run": "?state=all&run={run_id}",
        "that are acknowledged": "?state=acknowledged",
        "by cause": "?state=all&by=cause",
    },
    "alert": {"": ""},
    "rules": {"": ""},
    "rule_new": {"": ""},
    "rule": {"": ""},
    "channels": {"": ""},
    "settings": {"": ""},
    "imports": {"": ""},
    "shared_reports": {"": ""},
    "shared_report_new": {"": "?{chosen}"},
    "shared_report": {"": ""},
    "shared": {"": ""},
    "account": {"": ""},
    "factor": {"": ""},
    "server_status": {"": ""},
    "server_audit": {"": "", "without a match": "?by=nobody&first=x"},
    "project_audit": {"": ""},
}
"""The queries of each page's states; the state "" is the page itself."""
SIGNED_OUT: Final[dict[str, int]] = {"signin": 200, "signin_link": 410, "shared": 410}
"""Pages that are shown without an account, with the status for a secret that nobody has."""
OTHERS: Final = (
    *("import_list", "project_events", "run_events", "alert_picture", "tensor_find", "llms"),
    *("oidc_start", "oidc_callback", "server_audit_file"),
)
"""No pages: a part of one, streams that do not end, a picture with a signature, redirects, a file, a text."""


def address_of(name: str, values: Mapping[str, Any], query: str = "") -> str:
    """The address with this name in urls.py, with the values that its route needs."""
    return "/" + re.sub(r"<\w+:(\w+)>", lambda part: str(values[part[1]]), ROUTES[name]) + query


def states(values: Mapping[str, Any]) -> dict[str, str]:
    """The address of each state of each page, by its name."""
    return {
        " ".join(filter(None, (name, state))): address_of(name, values, query.format_map(values))
        for name, queries in PAGES.items()
        for state, query in queries.items()
    }

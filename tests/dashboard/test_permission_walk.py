"""Who may do what: every address of the URL resolver, with every method, as every role and token.

Each address has an entry in `PAGES` or `ENDPOINTS`, which says who may use it. An address without one fails
`test_every_address_has_an_entry`. Forms name their permission of accounts/permissions.py, whose table gives
the expected answers. Requests use the ids of real objects, and each is rolled back.
"""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import pytest
from dashboard.helpers.addresses import Addresses
from dashboard.helpers.visitors import Visitor, visitor_of
from django.db import transaction
from django.http import HttpResponseBase
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver
from django.utils import timezone

from fp8scope_dashboard.accounts.models import ApiToken, Project, Role, Scope, User
from fp8scope_dashboard.accounts.permissions import (
    ALERTS,
    CHANGE_CHANNELS,
    CHANGE_MEMBERS,
    CHANGE_PROJECT,
    CHANGE_RULES,
    COMMAND,
    CREATE_TOKENS,
    DELETE_RUNS,
    DELETE_VIEWS,
    DESCRIBE_RUNS,
    END_REPORTS,
    IMPORT_FILES,
    MAKE_REPORTS,
    READ,
    READ_AUDIT,
    REVOKE_TOKENS,
    ROTATE_TOKENS,
    SAVE_VIEWS,
    TRY_RULES,
    UNDO_RUNS,
    Permission,
)
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.accounts.tokens import create_token, revoke_token, rotate_token
from fp8scope_dashboard.runs.models import Run

METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")
# The author is a member who made everything that the addresses name; for the others, somebody else did.
ROLES: Final = ("anonymous", "stranger", "viewer", "member", "author", "admin", "superuser")
ONLY_THE_AUTHOR: Final = "only the author"
TOKENS: Final = (
    *("none", "session", "revoked", "expired", "rotated", "own", "write", "read", "administer", "elsewhere"),
    # It has every scope, and its owner is a member.
    "of a member",
)


@dataclass(frozen=True)
class Page:
    """The least role that may read a page, and that may post to it; None where there is no such method."""

    read: str | None = None
    post: str | None = None


def pages(names: str, read: str | None = None, post: str | None = None) -> dict[str, Page]:
    return dict.fromkeys(names.split(), Page(read, post))


def forms(permission: Permission, names: str) -> dict[str, Page]:
    """Pages that only take forms, which need this permission."""
    return pages(names, post=least(permission))


def least(permission: Permission) -> str:
    """The least role of `ROLES` with a permission, from the table of docs/accounts.md."""
    if permission.others is None:
        return ONLY_THE_AUTHOR
    return permission.own.value if permission.own == permission.others else "author"


PAGES: Final[Mapping[str, Page]] = {
    # Everybody. The secret in the address of the last ones is what lets people in.
    **pages("signin signin_link", read="anonymous", post="anonymous"),
    **pages("signout", post="anonymous"),
    # Without the first factor, and without a provider, they lead to the sign-in page or are not there.
    **pages("signin_code", read="anonymous", post="anonymous"),
    **pages("shared alert_picture llms", read="anonymous"),
    # Whoever is signed in, about themselves.
    **pages("account", read="stranger", post="stranger"),
    **pages("factor", read="stranger", post="stranger"),
    **pages("account_time_zone account_sign_out factor_confirm factor_change", post="stranger"),
    **pages("home", read="stranger"),
    **pages("server_status server_status_json server_metrics", read="superuser"),
    **pages("server_audit server_audit_file", read="superuser"),
    **pages("project_audit project_audit_file", read=READ_AUDIT.own.value),
    **pages(
        """
        project run spark figure compare compare_figure evaluations scores alerts evidence settings token_list
        ranks run_commands run_reports report_figure run_data run_export diagnosis readiness readiness_figure
        changes related_runs progress channels channel_list alert alerts_recent rules rule rule_new rule_trial
        score_differences shared_reports shared_report run_suggest tensor tensor_map tensor_picture
        tensor_ranking tensor_find compare_find compare_configuration console_lines console_text
        panel_figure panel_form project_events run_events runs_figure run_charts run_scatter run_parallel
        step_note fleet fleet_json certificate media media_content
        """,
        read="viewer",
    ),
    # What people do for themselves: it changes nothing that others see.
    **forms(READ, "compare_selected list_density"),
    **forms(SAVE_VIEWS, "view_save panel_save panels_change panel_view_save"),
    **forms(DELETE_VIEWS, "view_delete panel_view_delete"),
    "shared_report_new": Page("viewer", least(MAKE_REPORTS)),
    **forms(MAKE_REPORTS, "share_link_new"),
    **forms(END_REPORTS, "share_link_revoke shared_report_delete"),
    **forms(ALERTS, "alert_change acknowledge_many acknowledge_undo delivery_again"),
    **forms(CREATE_TOKENS, "token_create"),
    **forms(REVOKE_TOKENS, "token_revoke"),
    **forms(ROTATE_TOKENS, "token_rotate"),
    **forms(COMMAND, "command_new"),
    **forms(TRY_RULES, "rule_try"),
    **forms(CHANGE_RULES, "rule_create rule_save rule_switch rule_remove change_undo"),
    **forms(
        DESCRIBE_RUNS,
        """
        note_save note_preview artefact_new artefact_remove step_note_save step_note_remove runs_change
        run_colour comparison_margin baseline_new group_new choice_undo
        """,
    ),
    **pages("imports import_list", read=least(IMPORT_FILES)),
    **forms(IMPORT_FILES, "import_new"),
    **forms(UNDO_RUNS, "runs_undo"),
    **forms(DELETE_RUNS, "run_delete"),
    **forms(CHANGE_CHANNELS, "channel_create channel_change"),
    **forms(CHANGE_PROJECT, "margins retention project_general project_archive panel_view_default"),
    **forms(CHANGE_MEMBERS, "member_add member_change"),
    # Only administrators of the server make projects.
    **pages("project_new", post="superuser"),
}


@dataclass(frozen=True)
class Endpoint:
    """The scope that an endpoint needs, None for any token, and a valid body."""

    scope: Scope | None
    body: Any = None


MESSAGE: Final = {"writer": str(uuid.UUID(int=7)), "seq": 0}
ROW: Final = {"step": 1, "time": "2026-01-01T00:00:00Z", "scalars": {"loss": 1.0}}
SCORES: Final = {"step": 1, "name": "e", "metric": "accuracy", "kind": "proportion", "items": [1, 0]}
ENDPOINTS: Final[Mapping[tuple[str, str], Endpoint]] = {
    ("PUT", "runs/{run}"): Endpoint(Scope.WRITE, {"name": "r"}),
    ("POST", "runs/{run}/writers/{writer}/tensors"): Endpoint(Scope.WRITE, {"tensors": []}),
    ("POST", "runs/{run}/batches"): Endpoint(Scope.WRITE, {**MESSAGE, "protocol": 1, "rows": [ROW]}),
    ("POST", "runs/{run}/histograms"): Endpoint(Scope.WRITE, {}),
    ("POST", "runs/{run}/media"): Endpoint(Scope.WRITE, {}),
    ("POST", "runs/{run}/evaluations"): Endpoint(Scope.WRITE, {**MESSAGE, **SCORES}),
    ("POST", "runs/{run}/step_notes"): Endpoint(Scope.WRITE, {"step": 1, "text": "Seen."}),
    ("POST", "runs/{run}/commands"): Endpoint(Scope.ADMINISTER, {"kind": "pause"}),
    ("POST", "runs/{run}/reports"): Endpoint(Scope.WRITE, {**MESSAGE, "kind": "accepts", "accepts": []}),
    ("POST", "runs/{run}/finish"): Endpoint(Scope.WRITE, MESSAGE),
    ("POST", "runs/{run}/heartbeat"): Endpoint(Scope.WRITE, MESSAGE),
    ("GET", "runs/{run}"): Endpoint(Scope.READ),
    ("GET", "runs/{run}/writers/{writer}"): Endpoint(Scope.READ),
    ("GET", "runs/{run}/diagnosis"): Endpoint(Scope.READ),
    ("GET", "runs/{run}/certificate"): Endpoint(Scope.READ),
    ("GET", "runs/{run}/history"): Endpoint(Scope.READ),
    ("GET", "runs/{run}/console"): Endpoint(Scope.READ),
    ("GET", "runs/{run}/series"): Endpoint(Scope.READ),
    ("GET", "runs/{run}/heatmap"): Endpoint(Scope.READ),
    ("GET", "runs/{run}/evaluation_matrix"): Endpoint(Scope.READ),
    ("GET", "runs/{run}/readiness"): Endpoint(Scope.READ),
    ("GET", "runs/{run}/export"): Endpoint(Scope.READ),
    ("GET", "runs/{run}/export/{progress}"): Endpoint(Scope.READ),
    **{
        ("GET", f"runs/{{run}}/{name}"): Endpoint(Scope.READ)
        for name in (
            *("alerts", "course", "efficiency", "environment", "evaluations", "figures", "figures/{name}"),
            *("histograms", "ranks", "scalars", "tensors", "tensors/ranking", "verdict"),
            *("card", "media", "media/{item}"),
        )
    },
    **{
        ("GET", name): Endpoint(Scope.READ)
        for name in (
            "alerts",
            "alerts/{alert}",
            "alerts/{alert}/figure",
            "compare",
            "figures/{name}",
            "fleet",
        )
    },
    ("GET", "runs"): Endpoint(Scope.READ),
    ("GET", "rules"): Endpoint(Scope.READ),
    ("PUT", "rules"): Endpoint(Scope.ADMINISTER, {"version": 1, "rules": []}),
    ("DELETE", "runs/{run}"): Endpoint(Scope.ADMINISTER),
    ("GET", "project"): Endpoint(Scope.READ),
    ("PATCH", "project"): Endpoint(Scope.ADMINISTER, {"name": "n", "description": "d", "archived": True}),
    ("GET", "token"): Endpoint(None),
    ("POST", "token/rotate"): Endpoint(None),
    ("GET", "tokens"): Endpoint(Scope.ADMINISTER),
    ("POST", "projects"): Endpoint(Scope.ADMINISTER, {"slug": "new", "name": "New"}),
}
# It has the losses of the baselines, which other tokens have registered.
OF_OTHER_RUNS: Final = {"runs/{run}/certificate"}
# The description of the API, without data.
PUBLIC: Final = {"", "openapi.json", "docs"}
QUERIES: Final = {
    "runs/{run}/series": "?scalar=loss",
    "runs/{run}/heatmap": "?statistic=amax",
    "runs/{run}/histograms": "?tensor=a.input",
    "compare": "?a={run}&b={run}",
}
# They name an object of the project without a run in the path.
NAMING: Final = {"compare", "alerts/{alert}", "alerts/{alert}/figure"}


def entries(patterns: list[Any], prefix: str = "") -> Iterator[tuple[str, URLPattern]]:
    """Every address of the resolver, with the start of its route."""
    for entry in patterns:
        route = prefix + str(entry.pattern)
        if isinstance(entry, URLResolver):
            yield from entries(entry.url_patterns, route)
        else:
            yield route, entry


ADDRESSES: Final = list(entries(get_resolver().url_patterns))
API: Final = "api/v1/"


def api_routes() -> set[str]:
    """The routes of the API in the form of `ENDPOINTS`."""
    routes = {route.removeprefix(API) for route, _ in ADDRESSES if route.startswith(API)}
    return {route.replace("<uuid:", "{").replace("<", "{").replace(">", "}") for route in routes}


def test_every_address_has_an_entry() -> None:
    # tests/dashboard/mlflow_tracking and otlp_metrics cover the endpoints of MLflow and OpenTelemetry.
    names = [entry.name for route, entry in ADDRESSES if not route.startswith((API, "mlflow/", "otlp/"))]
    assert set(names) - {*OF_A_PROVIDER} == PAGES.keys() and len(names) == len(set(names))
    assert api_routes() == {route for _, route in ENDPOINTS} | PUBLIC


def outcome(answer: HttpResponseBase) -> str:
    """How an answer treats its client: the way it is refused, or `allowed`."""
    status, location = answer.status_code, answer.headers.get("Location", "")
    # Not closed: that would end the database connection of the test, which the test client prevents only
    # within a request.
    assert status < 500, answer
    if status == 401 or (status == 302 and location.startswith("/signin/?next=")):
        return "sign in"
    return {403: "forbidden", 404: "hidden", 405: "no such method"}.get(status, "allowed")


def send(client: Client, method: str, address: str, **options: Any) -> str:
    """The outcome of a request, which is rolled back, with the client's cookies."""
    cookies = copy.deepcopy(client.cookies)
    with transaction.atomic():
        result = outcome(client.generic(method, address, **options))
        transaction.set_rollback(True)
    client.cookies = cookies
    return result


@pytest.fixture
def owner(db: None) -> Visitor:
    return visitor_of(create_project("research", "Research"), "ada", Role.ADMIN)


def client_of(role: str, project: Project) -> Client:
    if role == "stranger":
        return visitor_of(create_project("elsewhere", "Elsewhere"), "sam", Role.ADMIN).client
    if role in Role.values:
        return visitor_of(project, role, Role(role)).client
    client = Client(raise_request_exception=True)
    if role == "superuser":
        client.force_login(User.objects.create_superuser("root"))
    return client


def expected(name: str, needed: str, role: str) -> str:
    if needed == ONLY_THE_AUTHOR:
        needed = "author" if ROLES.index(role) <= ROLES.index("author") else "nobody"
    if needed != "nobody" and ROLES.index(role) >= ROLES.index(needed):
        return "allowed"
    if role == "anonymous" or name in ("server_status_json", "server_metrics"):
        return "sign in"
    return "hidden" if role == "stranger" and needed != "superuser" else "forbidden"


# Links with a wrong secret look the same to everybody; a right one is used by tests of their own.
SECRET_IN_ADDRESS: Final = ("signin_link", "shared", "alert_picture")
# Of no use without a provider; tests/dashboard/accounts/oidc covers them.
OF_A_PROVIDER: Final = ("oidc_start", "oidc_callback")


@pytest.mark.parametrize("role", ROLES)
def test_pages(role: str, owner: Visitor) -> None:
    author = visitor_of(owner.project, role, Role.MEMBER) if role == "author" else owner
    addresses = Addresses(owner, author=author.user)
    client = author.client if role == "author" else client_of(role, owner.project)
    wrong = []
    for name, allowed in PAGES.items():
        if name in SECRET_IN_ADDRESS:
            continue
        address = addresses.of(name) + ("?tensor=a.input" if name == "tensor_find" else "")
        for method in METHODS:
            needed = {"GET": allowed.read, "POST": allowed.post}.get(method)
            form = {"content_type": "application/x-www-form-urlencoded"} if method == "POST" else {}
            result = send(client, method, address, **form)
            wanted = "no such method" if needed is None else expected(name, needed, role)
            # Whoever is refused anyway may get either answer to a method that does not exist.
            is_refused = needed is None and result != "allowed"
            if result != wanted and not is_refused:
                wrong.append((name, method, result))
    assert not wrong


class Tokens:
    """Headers of each kind of client of the API. `own` has registered the run.

    `rotated` is a secret whose overlap with the one that replaced it is over.
    """

    def __init__(self, owner: Visitor, run: Run) -> None:
        project, elsewhere = owner.project, create_project("elsewhere", "Elsewhere", owner.user)
        member, over = visitor_of(project, "mona", Role.MEMBER).user, timezone.now() - timedelta(hours=1)
        self._headers: dict[str, dict[str, str]] = {"none": {}, "session": {}}
        for name, of, scopes in (
            ("revoked", project, list(Scope)),
            ("expired", project, list(Scope)),
            ("rotated", project, list(Scope)),
            ("of a member", project, list(Scope)),
            ("own", project, [Scope.WRITE]),
            ("write", project, [Scope.WRITE]),
            ("read", project, [Scope.READ]),
            ("administer", project, [Scope.ADMINISTER]),
            ("elsewhere", elsewhere, list(Scope)),
        ):
            token, secret = create_token(of, name, member if name == "of a member" else owner.user, scopes)
            self._headers[name] = {"Authorization": f"Bearer {secret}"}
            if name == "revoked":
                revoke_token(token)
            if name == "expired":
                ApiToken.objects.filter(pk=token.pk).update(expires_at=over)
            if name == "rotated":
                rotate_token(token)
                ApiToken.objects.filter(pk=token.pk).update(former_until=over)
            if name == "own":
                Run.objects.filter(pk=run.pk).update(registered_with=token)
        self._member = owner.client

    def client(self, name: str) -> Client:
        return self._member if name == "session" else Client(headers=self._headers[name])


def expected_of_token(token: str, method: str, route: str, scope: Scope | None) -> str:
    if token in ("none", "session", "revoked", "expired", "rotated"):
        return "sign in"
    if scope is None:
        return "allowed"
    if route == "projects":
        # Also the tokens that administer a project: they are not of an administrator of the server.
        return "forbidden"
    if token == "elsewhere":
        # Registering a run that exists in another project is a conflict (409).
        names_a_run = "{run}" in route or route in NAMING
        return "hidden" if names_a_run and method != "PUT" else "allowed"
    allowed = {
        "own": {Scope.WRITE, Scope.READ}
        if "{run}" in route and route not in OF_OTHER_RUNS
        else {Scope.WRITE},
        "write": {Scope.WRITE},
        "read": {Scope.READ},
        "administer": {Scope.READ, Scope.ADMINISTER},
        "of a member": {Scope.READ, Scope.WRITE},
    }
    return "allowed" if scope in allowed[token] else "forbidden"


@pytest.mark.parametrize("token", TOKENS)
def test_the_api(token: str, owner: Visitor) -> None:
    addresses = Addresses(owner)
    run, alert = addresses.run, addresses.event.pk
    client = Tokens(owner, run).client(token)
    wrong = []
    for route in sorted({route for _, route in ENDPOINTS}):
        path = f"/{API}{route}{QUERIES.get(route, '')}".replace("{run}", str(run.pk))
        path = path.replace("{writer}", str(uuid.UUID(int=7))).replace("{progress}", str(uuid.UUID(int=8)))
        path = path.replace("{name}", "loss" if "{run}" in route else "scores").replace("{alert}", str(alert))
        path = path.replace("{item}", str(addresses.media.pk))
        for method in METHODS:
            endpoint = ENDPOINTS.get((method, route))
            body = json.dumps(endpoint.body if endpoint is not None else {})
            result = send(client, method, path, data=body, content_type="application/json")
            wanted = "no such method"
            if endpoint is not None:
                wanted = expected_of_token(token, method, route, endpoint.scope)
            if result != wanted:
                wrong.append((route, method, result))
    assert not wrong


@pytest.mark.parametrize("token", ["own", "administer"])
def test_tokens_open_no_page(token: str, owner: Visitor) -> None:
    addresses = Addresses(owner)
    client = Tokens(owner, addresses.run).client(token)
    for name, allowed in PAGES.items():
        if allowed.read not in (None, "anonymous"):
            assert send(client, "GET", addresses.of(name)) == "sign in", name


def test_secrets_in_addresses_are_needed(db: None) -> None:
    for path in ("/signin/x/", "/shared/x/", "/alert-pictures/x.png"):
        answer = Client().get(path)
        assert answer.status_code in (404, 410) or b"no longer" in answer.content, path

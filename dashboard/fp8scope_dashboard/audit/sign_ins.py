"""Sign-ins, second factors and roles from groups in the audit log, by the signals of accounts.

A failed sign-in is written for names that exist; the limits on attempts bound how many there can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.contrib.auth.signals import user_logged_in, user_login_failed
from django.dispatch import receiver
from django.http import HttpRequest

from fp8scope_dashboard.accounts.models import Project, User
from fp8scope_dashboard.accounts.oidc.identities import RoleChanges
from fp8scope_dashboard.accounts.signals import code_refused, factor_changed, roles_synchronised
from fp8scope_dashboard.audit.log import Actor, record
from fp8scope_dashboard.audit.models import Action

BY_GROUPS = "groups of single sign-on"


@receiver(user_logged_in, dispatch_uid="audit.signed_in")
def on_signed_in(request: HttpRequest | None, user: User, **_: Any) -> None:
    # Without a request of a client, a program has made the session.
    if request is not None and "REQUEST_METHOD" in request.META:
        record(_actor(user, request), None, Action.SIGNED_IN, user.username)


@receiver(user_login_failed, dispatch_uid="audit.sign_in_failed")
def on_failed(credentials: Mapping[str, Any], request: HttpRequest | None, **_: Any) -> None:
    user = User.objects.filter(username=str(credentials.get("username") or "")[:150]).first()
    if user is not None:
        record(_actor(user, request), None, Action.SIGN_IN_FAILED, f"{user.username}: wrong password")


@receiver(code_refused, dispatch_uid="audit.code_refused")
def on_code_refused(user: User, request: HttpRequest, **_: Any) -> None:
    text = f"{user.username}: wrong code of the second factor"
    record(_actor(user, request), None, Action.SIGN_IN_FAILED, text)


@receiver(factor_changed, dispatch_uid="audit.factor_changed")
def on_factor_changed(user: User, text: str, request: HttpRequest | None, **_: Any) -> None:
    actor = Actor() if request is None else _actor(user, request)
    record(actor, None, Action.FACTOR, f"{user.username}: {text}")


@receiver(roles_synchronised, dispatch_uid="audit.roles_synchronised")
def on_roles(user: User, changes: RoleChanges, **_: Any) -> None:
    projects = Project.objects.in_bulk([number for number in changes if number is not None])
    for number, (before, after) in changes.items():
        project = None if number is None else projects[number]
        where = " of the server" if project is None else ""
        text = f"{user.username}: {before or 'none'} → {after or 'none'}{where}"
        record(Actor(label=BY_GROUPS), project, Action.ROLES_SYNCHRONISED, text)


def _actor(user: User, request: HttpRequest | None) -> Actor:
    return Actor(user, None, "" if request is None else request.META.get("REMOTE_ADDR") or "")

"""Members, name and default baseline of a project."""

from __future__ import annotations

import re

from dashboard.helpers.visitors import Visitor, visitor_of
from django.test import Client

from fp8scope_dashboard.accounts.models import Membership, Role, User
from fp8scope_dashboard.accounts.services import create_project


def post(visitor: Visitor, rest: str, **data: str) -> str:
    """Submit a form of the settings; returns the page that follows."""
    return visitor.client.post(visitor.address(f"settings/{rest}"), data, follow=True).content.decode()


def roles(visitor: Visitor) -> dict[str, str]:
    members = Membership.objects.filter(project=visitor.project)
    return dict(members.values_list("user__username", "role"))


def test_it_works(admin: Visitor) -> None:
    User.objects.create_user("bob")
    assert "bob is now a member" in post(admin, "members/new", name="bob", role="viewer")
    bob = Membership.objects.get(user__username="bob")
    assert "bob has the role admin now" in post(admin, f"members/{bob.pk}", role="admin")
    assert roles(admin) == {"ada": "admin", "bob": "admin"}
    assert "bob is no longer a member" in post(admin, f"members/{bob.pk}", remove="1")
    assert roles(admin) == {"ada": "admin"}


def test_a_removal_can_be_undone(admin: Visitor, member: Visitor) -> None:
    own = Membership.objects.get(user=member.user)
    page = post(admin, f"members/{own.pk}", remove="1")
    assert "Make mia a member again?" in page
    (form,) = re.findall(r'<form class="notice row undo".*?</form>', page, flags=re.DOTALL)
    fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', form))
    (address,) = re.findall(r'action="([^"]*)"', form)
    assert "Undone: Removed a member: mia" in admin.client.post(address, fields, follow=True).content.decode()
    assert roles(admin)["mia"] == "member"
    settings = admin.client.get(admin.address("settings/")).content.decode()
    assert "a member again?" not in settings, "it is offered once"


def test_only_a_whole_page_takes_the_offer_to_undo(admin: Visitor, member: Visitor) -> None:
    own = Membership.objects.get(user=member.user)
    admin.client.post(admin.address(f"settings/members/{own.pk}"), {"remove": "1"})
    part = admin.client.get(admin.address(), headers={"HX-Request": "true", "HX-Target": "runs"})
    assert "a member again?" not in part.content.decode()
    assert "a member again?" in admin.client.get(admin.address("settings/")).content.decode()


def test_the_last_administrator_stays(admin: Visitor, member: Visitor) -> None:
    own = Membership.objects.get(user=admin.user)
    for data in ({"remove": "1"}, {"role": "viewer"}):
        assert "only administrator" in post(admin, f"members/{own.pk}", **data)
    assert roles(admin)["ada"] == "admin"
    other = Membership.objects.get(user=member.user)
    post(admin, f"members/{other.pk}", role="admin")
    page = post(admin, f"members/{own.pk}", remove="1")
    assert roles(admin) == {"mia": "admin"} and "Members" not in page, "the page leads out of the project"


def test_refuses_who_is_unknown_deactivated_or_a_member_already(admin: Visitor, member: Visitor) -> None:
    User.objects.create_user("gone", is_active=False)
    assert "There is no user “nobody”" in post(admin, "members/new", name="nobody", role="member")
    assert "There is no user “gone”" in post(admin, "members/new", name="gone", role="member")
    assert "mia is a member already" in post(admin, "members/new", name="mia", role="admin")
    assert roles(admin) == {"ada": "admin", "mia": "member"}


def test_an_unknown_role_is_the_lowest(admin: Visitor) -> None:
    User.objects.create_user("bob")
    post(admin, "members/new", name="bob", role="emperor")
    assert roles(admin)["bob"] == "viewer"


def test_an_administrator_of_the_server_invites(admin: Visitor) -> None:
    admin.user.is_superuser = True
    admin.user.save()
    page = post(admin, "members/new", name="newcomer", role="member")
    (path,) = re.findall(r"https?://[^/]+(/signin/[\w-]+/)", page)
    assert roles(admin)["newcomer"] == "member"
    guest = Client()
    guest.post(path)
    assert guest.get(admin.address()).status_code == 200
    assert (
        "already exists" not in page
        and path not in admin.client.get(admin.address("settings/")).content.decode()
    )
    assert "username:" in post(admin, "members/new", name="not a name", role="member")


def test_others_cannot_create_accounts(admin: Visitor) -> None:
    post(admin, "members/new", name="newcomer", role="member")
    assert not User.objects.filter(username="newcomer").exists()


def test_a_member_of_another_project_is_not_found(admin: Visitor) -> None:
    other = visitor_of(create_project("elsewhere", "Elsewhere"), "sam", Role.ADMIN)
    member = Membership.objects.get(user=other.user)
    assert (
        admin.client.post(admin.address(f"settings/members/{member.pk}"), {"remove": "1"}).status_code == 404
    )


def test_the_name_and_the_default_baseline(admin: Visitor) -> None:
    page = post(admin, "general", name="FP8 study", default_baseline="bf16")
    admin.project.refresh_from_db()
    assert (admin.project.name, admin.project.default_baseline) == ("FP8 study", "bf16")
    assert "FP8 study" in page
    assert "name:" in post(admin, "general", name="")
    admin.project.refresh_from_db()
    assert admin.project.name == "FP8 study"

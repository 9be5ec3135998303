"""Making, renaming, describing and archiving projects."""

from __future__ import annotations

import pytest

from fp8scope_dashboard.accounts import projects
from fp8scope_dashboard.accounts.models import Membership, Project, Role, User
from fp8scope_dashboard.alerts.models import Rule


def test_it_works(db: None) -> None:
    owner = User.objects.create_user("ada")
    project = projects.make("gpt", " GPT ", " Our runs. ", owner)
    assert (project.slug, project.name, project.description) == ("gpt", "GPT", "Our runs.")
    assert Membership.objects.get(project=project, user=owner).role == Role.ADMIN
    assert Rule.objects.filter(project=project).exists()


@pytest.mark.parametrize(
    ("slug", "name", "description"),
    [("", "x", ""), ("a b", "x", ""), ("taken", "x", ""), ("new", "", ""), ("new", "x", "d" * 2_001)],
)
def test_refuses_with_the_field(db: None, slug: str, name: str, description: str) -> None:
    projects.make("taken", "Taken")
    with pytest.raises(projects.ProjectError, match="slug|name|description"):
        projects.make(slug, name, description)
    assert Project.objects.count() == 1


def test_says_what_has_changed(project: Project) -> None:
    assert projects.change(project, name="New", description="d") == ["name “New”", "description “d”"]
    assert projects.change(project, name="New", description="d", archived=False) == []
    assert projects.change(project, archived=True) == ["archived"]
    project.refresh_from_db()
    assert project.archived_at is not None and project.name == "New"
    assert projects.change(project, archived=False) == ["no longer archived"]


def test_a_refused_change_changes_nothing(project: Project) -> None:
    with pytest.raises(projects.ProjectError, match="name"):
        projects.change(project, name=" ", description="d")
    project.refresh_from_db()
    assert (project.name, project.description) == ("Default", "")

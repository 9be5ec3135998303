"""Make the project that a demo writes to: `python -m fp8scope_dashboard.demo.project BASE_URL`.

A process of its own, so that the demo's needs no Django. Prints one JSON object; it holds secrets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import django

from fp8scope_dashboard.embedded.processes import ServerError

SLUG = "demo"
MARGIN = 0.01
"""The relative difference in loss that counts as none. Wider than a project's usual one: the demo's runs are
short and the model is small, and what E4M3's three mantissa bits cost is then about half a per cent."""
MAKE_SECONDS = 60.0


@dataclass(frozen=True)
class DemoProject:
    """Where the runs go. `token` and `link` are secrets."""

    slug: str
    page: str
    token: str = field(repr=False)
    link: str = field(repr=False)


def make(base_url: str, environment: Mapping[str, str]) -> DemoProject:
    """Make a new project in the installation that `environment` describes.

    Raises:
        ServerError: it could not be made; the message carries the end of what was said about it.
    """
    command = [sys.executable, "-m", "fp8scope_dashboard.demo.project", base_url]
    done = subprocess.run(
        command, env=dict(environment), capture_output=True, text=True, timeout=MAKE_SECONDS, check=False
    )
    if done.returncode != 0:
        tail = "\n".join(done.stderr.splitlines()[-10:])
        raise ServerError(f"the demo's project could not be made:\n{tail}")
    return DemoProject(**json.loads(done.stdout.splitlines()[-1]))


def create(base_url: str) -> DemoProject:
    """A project of its own for each demo (demo, demo-2, ...): earlier ones stay to be looked at."""
    from urllib.parse import quote

    from django.urls import reverse

    from fp8scope_dashboard.accounts import services
    from fp8scope_dashboard.accounts.models import Project, User

    taken = set(Project.objects.filter(slug__startswith=SLUG).values_list("slug", flat=True))
    number = next(n for n in range(1, len(taken) + 2) if _slug(n) not in taken)
    user = User.objects.filter(is_superuser=True, is_active=True).order_by("pk").first()
    if user is None:
        raise ServerError("this installation has no administrator: choose another --data-dir")
    project = services.create_project(_slug(number), f"Demo {number}" if number > 1 else "Demo", owner=user)
    project.margin = MARGIN
    project.save(update_fields=["margin"])
    _, token = services.create_token(project, "demo", user)
    page = reverse("project", args=[project.slug])
    link = f"{services.create_sign_in_link(user, base_url)}?next={quote(page)}"
    return DemoProject(project.slug, f"{base_url}{page}", token, link)


def _slug(number: int) -> str:
    return SLUG if number == 1 else f"{SLUG}-{number}"


def main(base_url: str) -> None:
    """Print the new project as JSON."""
    django.setup()
    print(json.dumps(asdict(create(base_url))), flush=True)
    # Django's connection pool has threads that would hold up our exit for some seconds.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])

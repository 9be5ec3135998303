"""Create the project of a demo: `python -m fp8scope_dashboard.demo.project BASE_URL`.

It runs as a separate process, so that the demo itself needs no Django. It prints a JSON object with secrets.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from urllib.parse import quote

import django

from fp8scope_dashboard.administration.database import disconnect
from fp8scope_dashboard.embedded.processes import ServerError

SLUG = "demo"
MARGIN = 0.01
"""The project's margin. It is wider than the default, because in short runs of a small model the three
mantissa bits of E4M3 cost about half a per cent."""
CREATE_SECONDS = 180.0


@dataclass(frozen=True)
class DemoProject:
    """The project that receives the runs. `token` and `link` are secrets."""

    slug: str
    page: str
    token: str = field(repr=False)
    link: str = field(repr=False)


def create_in_process(base_url: str, environment: Mapping[str, str]) -> DemoProject:
    """Create a project in the installation that `environment` describes, in a new process.

    Raises:
        ServerError: the process failed; the message contains the end of its output.
    """
    command = [sys.executable, "-m", "fp8scope_dashboard.demo.project", base_url]
    process = subprocess.run(
        command, env=dict(environment), capture_output=True, text=True, timeout=CREATE_SECONDS, check=False
    )
    if process.returncode != 0:
        tail = "\n".join(process.stderr.splitlines()[-10:])
        raise ServerError(f"cannot create the demo's project:\n{tail}")
    return DemoProject(**json.loads(process.stdout.splitlines()[-1]))


def create(base_url: str) -> DemoProject:
    """Create a new project (demo, demo-2, ...); earlier ones stay in the installation."""
    # Models can be imported only once Django is set up.
    from django.urls import reverse

    from fp8scope_dashboard.accounts import services
    from fp8scope_dashboard.accounts.models import Project, User
    from fp8scope_dashboard.accounts.tokens import create_token

    taken = set(Project.objects.filter(slug__startswith=SLUG).values_list("slug", flat=True))
    number = next(n for n in range(1, len(taken) + 2) if _slug(n) not in taken)
    user = User.objects.filter(is_superuser=True, is_active=True).order_by("pk").first()
    if user is None:
        raise ServerError("this installation has no administrator: use another --data-dir")
    project = services.create_project(_slug(number), f"Demo {number}" if number > 1 else "Demo", owner=user)
    project.margin = MARGIN
    project.save(update_fields=["margin"])
    _, token = create_token(project, "demo", user)
    page = reverse("project", args=[project.slug])
    link = f"{services.create_sign_in_link(user, base_url)}?next={quote(page)}"
    return DemoProject(project.slug, f"{base_url}{page}", token, link)


def _slug(number: int) -> str:
    return SLUG if number == 1 else f"{SLUG}-{number}"


def main(base_url: str) -> None:
    """Create a project and print it as JSON."""
    django.setup()
    print(json.dumps(asdict(create(base_url))), flush=True)
    disconnect()


if __name__ == "__main__":
    main(sys.argv[1])

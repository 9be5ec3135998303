"""Fill an installation for page_load.py: runs of the demo's size, a long run, and many runs for the list.

Run in the environment of the installation. Prints one JSON line: the addresses of the pages and the cookie of
a session. What an earlier call has stored is not stored again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# tensors, statistics, steps
DEMO_SIZE, DEMO_SEEDS = (36, 6, 600), 3
STATISTICS = 4
MANY = "many"


def cookie() -> str:
    """A session of the administrator."""
    from django.conf import settings
    from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY, get_user_model
    from django.contrib.sessions.backends.db import SessionStore

    from fp8scope_dashboard.accounts.models import Membership, Project, Role

    person = get_user_model().objects.filter(is_superuser=True).first()
    assert person is not None
    for project in Project.objects.all():
        Membership.objects.get_or_create(user=person, project=project, defaults={"role": Role.ADMIN})
    store = SessionStore()
    store[SESSION_KEY] = str(person.pk)
    store[BACKEND_SESSION_KEY] = settings.AUTHENTICATION_BACKENDS[0]
    store[HASH_SESSION_KEY] = person.get_session_auth_hash()
    store.create()
    return f"{settings.SESSION_COOKIE_NAME}={store.session_key}"


def run_of(name: str, size: tuple[int, int, int], **fields: Any) -> Any:
    """The stored run of this name, filled with random walks unless it exists."""
    from store_fill import fill

    from fp8scope_dashboard.runs.models import Run

    tensors, statistics, steps = size
    stored = Run.objects.filter(name=name).first()
    if stored is None:
        options = argparse.Namespace(
            recording=None, name=name, tensors=tensors, statistics=statistics, steps=steps, spikes=0
        )
        stored = Run.objects.get(pk=fill(options)["run"])
        Run.objects.filter(pk=stored.pk).update(**fields)
    return stored


def many_runs(count: int) -> Any:
    """A project with `count` runs without telemetry."""
    from fp8scope_dashboard.accounts.models import Project
    from fp8scope_dashboard.runs.models import Run, RunState

    project = Project.objects.get_or_create(slug=MANY, defaults={"name": "Many runs"})[0]
    missing = count - Run.objects.filter(project=project).count()
    Run.objects.bulk_create(
        [
            Run(
                project=project,
                name=f"run {i:05}",
                state=[RunState.FINISHED, RunState.FAILED, RunState.FINISHED][i % 3],
                precision=["bf16", "fp8"][i % 2],
                group=f"group {i // 8}",
                seed=i % 8,
                config={"lr": 1e-4 * (1 + i % 7), "layers": 12 + i % 5},
                tags=["nightly"] if i % 10 == 0 else [],
                last_step=1000 + i,
                last_scalars={"loss": 2.0 + (i % 97) / 100},
            )
            for i in range(max(0, missing))
        ],
        batch_size=1_000,
    )
    return project


def main() -> None:
    """Fill, and print the addresses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--runs", type=int, required=True)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    import django

    django.setup()
    for seed in range(DEMO_SEEDS):
        run_of(f"bf16 seed {seed}", DEMO_SIZE, precision="bf16", group="bf16", seed=seed)
    demo = run_of("fp8", DEMO_SIZE, precision="fp8", group="fp8", baseline="bf16", seed=0)
    size = (options.tensors, STATISTICS, options.steps)
    long = run_of(f"{options.tensors} x {options.steps}", size, precision="fp8")
    project = many_runs(options.runs)
    pages = {
        "demo": f"/p/{demo.project.slug}/runs/{demo.pk}/",
        "long": f"/p/{long.project.slug}/runs/{long.pk}/",
        "list": f"/p/{project.slug}/",
    }
    print(json.dumps({"pages": pages, "cookie": cookie()}))


if __name__ == "__main__":
    main()

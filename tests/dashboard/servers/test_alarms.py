"""`fp8scope up` prints the errors in the logs of its servers, except expected errors of PostgreSQL."""

from __future__ import annotations

import pytest

from fp8scope_dashboard.cli import echo_alarms

DUPLICATE = 'duplicate key value violates unique constraint "runs_run_pkey"'


def test_it_works(capsys: pytest.CaptureFixture[str]) -> None:
    echo_alarms("postgres", '2026-11-22 07:00:00 UTC [12] ERROR:  relation "x" does not exist')
    echo_alarms("web", "INFO 200 GET /")
    assert capsys.readouterr().out == (
        'postgres | 2026-11-22 07:00:00 UTC [12] ERROR:  relation "x" does not exist\n'
    )


@pytest.mark.parametrize(
    ("name", "line", "printed"),
    [
        ("postgres", f"2026-11-22 07:00:00 UTC [12] ERROR:  {DUPLICATE}", False),
        ("postgres", "2026-11-22 07:00:00 UTC [12] DETAIL:  Key (id)=(1) already exists.", False),
        ("postgres", "2026-11-22 07:00:00 UTC [12] FATAL:  the database system is shutting down", True),
        ("postgres", "2026-11-22 07:00:00 UTC [12] ERROR:  duplicate key in a list", True),
        ("web", f"ERROR django.db.utils.IntegrityError: {DUPLICATE}", True),
        ("worker", f"ERROR:  {DUPLICATE}", True),
        ("up", f"ERROR:  {DUPLICATE}", True),
        ("up", "the web server was restarted", True),
    ],
)
def test_prints_only_unexpected_errors(
    name: str, line: str, printed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    echo_alarms(name, line)
    assert bool(capsys.readouterr().out) is printed

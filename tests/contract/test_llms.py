"""`/llms.txt`: public, without data, and the same text as docs/llms.txt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dashboard.helpers.recording import make_run
from django.test import Client

from fp8scope_dashboard.accounts.services import create_project

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.django_db
def test_it_works() -> None:
    make_run(create_project("research", "Secret research"), "secret run")
    answer = Client().get("/llms.txt")
    assert answer.status_code == 200 and answer.headers["Content-Type"] == "text/plain; charset=utf-8"
    text = answer.content.decode()
    assert text == (DOCS / "llms.txt").read_text() and "ecret" not in text
    assert text.startswith("# fp8scope\n\n> ")


def test_every_link_leads_to_a_page_of_the_documentation() -> None:
    text = (DOCS / "llms.txt").read_text()
    names = re.findall(r"docs/([\w.-]+\.md)", text)
    assert len(names) >= 9 and all((DOCS / name).exists() for name in names)

"""A figure's function behind its address, and found again by it."""

from __future__ import annotations

import json

import pytest
from dashboard.helpers.recording import make_run
from dashboard.helpers.seeding import Seeded
from dashboard.helpers.visitors import Visitor
from django.http import Http404, QueryDict
from django.test.utils import override_script_prefix
from django.urls import Resolver404, reverse

from fp8scope_dashboard.accounts.models import User
from fp8scope_dashboard.pages.charts.addresses import figure_at
from fp8scope_dashboard.pages.charts.answers import Chart, EmptyChart


def test_it_works(admin: Visitor, seeded: Seeded) -> None:
    run = seeded.healthy
    address = reverse("figure", args=[run.project.slug, run.pk, "loss"])
    chart = figure_at(admin.user, address, QueryDict("first=10&last=20"))
    assert isinstance(chart, Chart) and run.name in chart.summary
    answered = admin.client.get(f"{address}?first=10&last=20")
    assert answered.content.decode() == chart.json()
    nothing = figure_at(admin.user, address, QueryDict("first=100000000"))
    assert isinstance(nothing, EmptyChart) and json.loads(nothing.json()) == {"empty": nothing.reason}


def test_below_another_path(admin: Visitor, seeded: Seeded) -> None:
    with override_script_prefix("/monitor/"):
        address = reverse("figure", args=[seeded.healthy.project.slug, seeded.healthy.pk, "loss"])
        assert address.startswith("/monitor/")
        assert isinstance(figure_at(admin.user, address, QueryDict()), Chart)


def test_a_stranger_gets_no_figure(seeded: Seeded) -> None:
    stranger = User.objects.create(username="stranger")
    address = reverse("figure", args=[seeded.healthy.project.slug, seeded.healthy.pk, "loss"])
    with pytest.raises(Http404):
        figure_at(stranger, address, QueryDict())


def test_an_address_without_a_figure(admin: Visitor, seeded: Seeded) -> None:
    assert figure_at(admin.user, reverse("project", args=[seeded.healthy.project.slug]), QueryDict()) is None
    with pytest.raises(Resolver404):
        figure_at(admin.user, "/no/such/address", QueryDict())


def test_an_empty_run_says_why(admin: Visitor) -> None:
    run = make_run(admin.project)
    address = admin.address(f"runs/{run.pk}/figures/loss.json")
    assert admin.client.get(address).json() == {"empty": "No loss yet. Log it with step.log(loss=…)."}
    as_file = admin.client.get(address, {"format": "csv"})
    assert as_file.status_code == 404 and "No loss yet" in as_file.content.decode()

"""The addresses of all pages of a project."""

from __future__ import annotations

import re

from dashboard.helpers.logged_media import log
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.visitors import Visitor
from django.urls import reverse

from fp8scope_dashboard.accounts.models import Membership, User
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.accounts.urls import urlpatterns as account_entries
from fp8scope_dashboard.alerts.models import Alert, Channel, Rule, RuleTrial
from fp8scope_dashboard.audit.log import Actor, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.db.encryption import encrypt_json
from fp8scope_dashboard.pages.urls import urlpatterns as page_entries
from fp8scope_dashboard.runs.models import Artefact, BulkAction, Run, SavedView, StepNote, Tensor
from fp8scope_dashboard.shared_reports.models import SharedReport, ShareLink

ENTRIES = (*account_entries, *page_entries)


class Addresses:
    """The addresses of all pages of a project that contains one object of each kind.

    `run` is a run of the project with tensors; without it, one is made that has a tensor and no rows.
    `author` made everything; without it, the visitor did.
    """

    def __init__(self, visitor: Visitor, run: Run | None = None, author: User | None = None) -> None:
        author = author or visitor.user
        self.slug = visitor.project.slug
        self.run = run or make_run(visitor.project, "a run")
        if run is None:
            Tensor.objects.create(run=self.run, index=0, name="a.input", module="a", role="input")
        Run.objects.filter(pk=self.run.pk).update(owner=author)
        self.rule = Rule.objects.filter(project=visitor.project).earliest("id")
        self.event = Alert.objects.create(
            run=self.run,
            rule=self.rule,
            kind="loss_spike",
            severity="warning",
            onset_step=1,
            step=2,
            message="Up.",
        )
        self.token, _ = create_token(visitor.project, "t", author)
        self.member = Membership.objects.create(
            user=User.objects.create_user("someone"), project=visitor.project
        )
        self.trial = RuleTrial.objects.create(project=visitor.project, document={})
        self.artefact = Artefact.objects.create(run=self.run, name="log", address="s3://bucket/log")
        self.media = log(Recorder(run=self.run), "sample", b"Once upon a time")
        self.note = StepNote.objects.create(run=self.run, step=1, text="Seen.")
        self.report = SharedReport.objects.create(
            project=visitor.project, title="r", content={}, created_by=author
        )
        self.link = ShareLink.objects.create(report=self.report, digest=bytes(32), created_by=author)
        self.change = BulkAction.objects.create(
            project=visitor.project, kind="archive", runs=[self.run.pk], done_by=author
        )
        self.view = SavedView.objects.create(
            project=visitor.project, owner=author, name="v", query="q=x", shared=True
        )
        self.charts = SavedView.objects.create(
            project=visitor.project, owner=author, name="c", page="charts", shared=True
        )
        self.entry = record(Actor(visitor.user), visitor.project, Action.RULES, "none", rules=[])
        self.channel = Channel.objects.create(
            project=visitor.project, name="c", sealed=encrypt_json({"url": "https://x.test"})
        )

    def of(self, page: str, /, **chosen: str) -> str:
        """The address of a page of the objects above; `chosen` replaces parts of it."""
        route = next(str(entry.pattern) for entry in ENTRIES if entry.name == page)
        arguments = {"run_id": self.run.pk, "alert_id": self.event.pk, "rule_id": self.rule.pk}
        arguments |= {"token_id": self.token.pk, "channel_id": self.channel.pk, "slug": self.slug}
        arguments |= {
            "name": "bisect" if page == "report_figure" else "loss",
            "form": "json" if page == "certificate" else "csv",
            "kind": "webhook",
            "field": "baseline",
            "trial_id": self.trial.pk,
            "artefact_id": self.artefact.pk,
            "note_id": self.note.pk,
            "report_id": self.report.pk,
            "link_id": self.link.pk,
            "member_id": self.member.pk,
            "action": "acknowledge",
            "action_id": self.change.pk,
            "view_id": self.charts.pk if page.startswith("panel_") else self.view.pk,
            "entry_id": self.entry.pk,
            "index": 0,
            "rank": 0,
            "item_id": self.media.pk,
            "change": "recovery",
            **chosen,
        }
        return reverse(page, kwargs={key: arguments[key] for key in re.findall(r"<\w+:(\w+)>", route)})

"""Frozen reports and their links."""

import uuid
from typing import ClassVar

from django.db import models
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project, User


class SharedReport(models.Model):
    """A person's selection of one or more runs, as it was when the report was made.

    It refers to no run: it stays as it is when runs go on, are compared again or are deleted.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="shared_reports")
    title = models.CharField(max_length=200)
    content = models.JSONField(help_text="The sections; see pages.reports.sections.")
    created_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering: ClassVar = ["-created_at"]
        indexes: ClassVar = [models.Index(fields=["project", "-created_at"])]

    def __str__(self) -> str:
        return self.title


class ShareLink(models.Model):
    """An address that shows one report without an account. Only the SHA-256 of its secret is stored."""

    report = models.ForeignKey(SharedReport, on_delete=models.CASCADE, related_name="links")
    digest = models.BinaryField(max_length=32, unique=True)
    created_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    created_at = models.DateTimeField(default=timezone.now)
    expires_at = models.DateTimeField(null=True, blank=True, help_text="Null: when it is revoked.")
    revoked_at = models.DateTimeField(null=True, blank=True)
    opened_at = models.DateTimeField(null=True, blank=True)
    times_opened = models.BigIntegerField(default=0)

    class Meta:
        ordering: ClassVar = ["-created_at"]

    @property
    def works(self) -> bool:
        """Return whether the link shows its report now."""
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > timezone.now())

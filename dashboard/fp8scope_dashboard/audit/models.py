"""Entries of the audit log."""

from typing import ClassVar

from django.db import models
from django.utils import timezone

from fp8scope_dashboard.accounts.models import ApiToken, Project, User


class Action(models.TextChoices):
    """A kind of change. The labels begin the sentence of an entry."""

    RULES = "rules", "Alert rules"
    COMMAND = "command", "Gave a command"
    NOTE = "note", "Wrote a note"
    RUN_DELETED = "run_deleted", "Deleted a run"
    RUNS_CHANGED = "runs_changed", "Changed runs"
    TOKEN_CREATED = "token_created", "Created a token"
    TOKEN_ROTATED = "token_rotated", "Gave a token a new secret"
    TOKEN_REVOKED = "token_revoked", "Revoked a token"
    MEMBER_ADDED = "member_added", "Added a member"
    MEMBER_CHANGED = "member_changed", "Changed a member’s role"
    MEMBER_REMOVED = "member_removed", "Removed a member"
    CHANNEL = "channel", "Changed an alert channel"
    PROJECT = "project", "Changed the project’s settings"
    LINK_CREATED = "link_created", "Made a link to a report"
    LINK_REVOKED = "link_revoked", "Revoked a link to a report"
    REPORT_DELETED = "report_deleted", "Deleted a report"
    IMPORTED = "imported", "Imported files"
    EXPORTED = "exported", "Exported"
    SIGNED_IN = "signed_in", "Signed in"
    SIGN_IN_FAILED = "sign_in_failed", "Failed to sign in"
    FACTOR = "factor", "Second factor"
    ROLES_SYNCHRONISED = "roles_synchronised", "Roles from groups"
    UNDONE = "undone", "Undid a change"


class Entry(models.Model):
    """One change: who made it, when and from which address. An entry is written once. It is deleted
    when its time is over, see audit.retention.

    `by` names the person, and the token that they used, as they were called then.
    """

    # Null: it concerns the server, such as a sign-in.
    project = models.ForeignKey(Project, null=True, on_delete=models.CASCADE, related_name="audit_entries")
    at = models.DateTimeField(default=timezone.now)
    action = models.CharField(max_length=32, choices=Action.choices)
    text = models.CharField(max_length=500, help_text="What was changed, such as the name of a rule.")
    details = models.JSONField(default=dict, help_text="What undoing the change needs.")
    user = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    token = models.ForeignKey(ApiToken, null=True, on_delete=models.SET_NULL, related_name="+")
    by = models.CharField(max_length=300)
    address = models.CharField(max_length=64, blank=True)
    undone_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        indexes: ClassVar = [models.Index(fields=["project", "-id"])]

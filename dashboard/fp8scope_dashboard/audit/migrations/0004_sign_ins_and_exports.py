"""Sign-ins, exports, new secrets of tokens, and entries that belong to no project."""

import django.db.models.deletion
from django.db import migrations, models

ACTIONS = [
    ("rules", "Alert rules"),
    ("command", "Gave a command"),
    ("note", "Wrote a note"),
    ("run_deleted", "Deleted a run"),
    ("runs_changed", "Changed runs"),
    ("token_created", "Created a token"),
    ("token_rotated", "Gave a token a new secret"),
    ("token_revoked", "Revoked a token"),
    ("member_added", "Added a member"),
    ("member_changed", "Changed a member’s role"),
    ("member_removed", "Removed a member"),
    ("channel", "Changed an alert channel"),
    ("project", "Changed the project’s settings"),
    ("link_created", "Made a link to a report"),
    ("link_revoked", "Revoked a link to a report"),
    ("report_deleted", "Deleted a report"),
    ("imported", "Imported files"),
    ("exported", "Exported"),
    ("signed_in", "Signed in"),
    ("sign_in_failed", "Failed to sign in"),
    ("factor", "Second factor"),
    ("roles_synchronised", "Roles from groups"),
    ("undone", "Undid a change"),
]


class Migration(migrations.Migration):
    dependencies = [("audit", "0003_imports"), ("accounts", "0003_token_lifetimes")]

    operations = [
        migrations.AlterField("entry", "action", models.CharField(choices=ACTIONS, max_length=32)),
        migrations.AlterField(
            "entry",
            "project",
            models.ForeignKey(
                null=True,
                on_delete=django.db.models.deletion.CASCADE,
                related_name="audit_entries",
                to="accounts.project",
            ),
        ),
    ]

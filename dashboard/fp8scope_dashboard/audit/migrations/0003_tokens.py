"""New secrets of tokens."""

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
    ("undone", "Undid a change"),
]


class Migration(migrations.Migration):
    dependencies = [("audit", "0002_notes")]

    operations = [
        migrations.AlterField("entry", "action", models.CharField(choices=ACTIONS, max_length=32)),
    ]

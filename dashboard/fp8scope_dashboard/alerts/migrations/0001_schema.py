"""The tables of rules, channels, alerts and deliveries."""

import django.core.validators
import django.db.models.deletion
import django.utils.timezone
import uuid
from django.conf import settings
from django.db import migrations, models

KINDS = [
    ("loss_not_finite", "Loss not finite"),
    ("loss_spike", "Loss spike"),
    ("loss_divergence", "Loss divergence"),
    ("above_baseline", "FP8 above baseline"),
    ("tensor_not_finite", "NaN or Inf in tensors"),
    ("saturation_rate", "Saturation rate"),
    ("saturation_rise", "Saturation above its past"),
    ("underflow_rate", "Underflow rate"),
    ("underflow_rise", "Underflow above its past"),
    ("scale_frozen", "Frozen scale"),
    ("scale_stale", "Stale scale"),
    ("scale_jump", "Scale jump"),
    ("scale_disagreement", "Scales differ between ranks"),
    ("amax_growth", "Growing amax"),
    ("noise_growth", "Growing quantisation noise"),
    ("kurtosis_growth", "Growing outliers"),
    ("logit_growth", "Growing attention logits"),
    ("router_collapse", "Uneven expert load"),
    ("update_growth", "Growing updates"),
    ("grad_norm", "Gradient norm"),
    ("throughput_drop", "Throughput drop"),
    ("data_wait", "Wait for data"),
    ("memory_creep", "Memory creep"),
    ("rank_behind", "Rank behind"),
    ("run_silent", "Run silent"),
    ("run_failed", "Run failed"),
    ("run_finished", "Run finished"),
    ("threshold", "Own rule"),
]


class Migration(migrations.Migration):
    replaces = [
        ("alerts", "0001_initial"),
        ("alerts", "0002_rule_action"),
        ("alerts", "0003_plain_labels"),
        ("alerts", "0004_generations"),
        ("alerts", "0005_channels"),
        ("alerts", "0006_life_of_an_alert"),
        ("alerts", "0007_signals"),
        ("alerts", "0008_loss_detectors"),
        ("alerts", "0009_early_signs"),
        ("alerts", "0010_reason_worse"),
        ("alerts", "0011_rises_above_the_lowest_level"),
        ("alerts", "0012_undone_acknowledgements"),
    ]

    initial = True

    dependencies = [
        ("accounts", "0001_schema"),
        ("runs", "0001_schema"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="Channel",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("kind", models.CharField(default="webhook", max_length=32)),
                ("name", models.CharField(max_length=128)),
                ("enabled", models.BooleanField(default=True)),
                ("created_at", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="channels",
                        to="accounts.project",
                    ),
                ),
                (
                    "sealed",
                    models.TextField(default="", help_text="The config, as `encrypt_json` returns it."),
                ),
                (
                    "least_severity",
                    models.CharField(
                        choices=[("warning", "Warning"), ("critical", "Critical")],
                        default="warning",
                        help_text="Alerts below this severity are not sent.",
                        max_length=16,
                    ),
                ),
                (
                    "send_resolved",
                    models.BooleanField(default=False, help_text="Also send a notice when an alert ends."),
                ),
                (
                    "per_minute",
                    models.PositiveIntegerField(
                        default=10,
                        help_text="Further messages of the same minute are sent together as one digest.",
                        validators=[
                            django.core.validators.MinValueValidator(1),
                            django.core.validators.MaxValueValidator(600),
                        ],
                    ),
                ),
                ("minute_started_at", models.DateTimeField(blank=True, null=True)),
                ("minute_messages", models.PositiveIntegerField(default=0)),
            ],
        ),
        migrations.CreateModel(
            name="Rule",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "kind",
                    models.CharField(
                        choices=KINDS,
                        max_length=32,
                    ),
                ),
                (
                    "severity",
                    models.CharField(
                        choices=[("warning", "Warning"), ("critical", "Critical")],
                        default="critical",
                        max_length=16,
                    ),
                ),
                ("parameters", models.JSONField(blank=True, default=dict)),
                ("enabled", models.BooleanField(default=True)),
                ("created_at", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="rules",
                        to="accounts.project",
                    ),
                ),
                (
                    "action",
                    models.CharField(
                        blank=True,
                        choices=[
                            ("", "Notify only"),
                            ("fallback", "Fall back to BF16"),
                            ("checkpoint", "Write a checkpoint"),
                            ("pause", "Pause the training"),
                        ],
                        default="",
                        max_length=16,
                    ),
                ),
                (
                    "channels",
                    models.ManyToManyField(
                        blank=True,
                        help_text="None: all channels of the project.",
                        related_name="+",
                        to="alerts.channel",
                    ),
                ),
                (
                    "condition",
                    models.CharField(
                        blank=True,
                        choices=[
                            ("above", "is above"),
                            ("below", "is below"),
                            ("rises_by", "rises by"),
                            ("falls_by", "falls by"),
                            ("changes_by_factor", "changes by a factor of"),
                            ("not_finite", "is not finite"),
                        ],
                        default="",
                        max_length=32,
                    ),
                ),
                ("critical_breaks_quiet", models.BooleanField(default=True)),
                ("escalate_minutes", models.PositiveIntegerField(blank=True, null=True)),
                (
                    "escalation_channels",
                    models.ManyToManyField(blank=True, related_name="+", to="alerts.channel"),
                ),
                ("name", models.CharField(blank=True, default="", max_length=128)),
                ("quiet_from", models.TimeField(blank=True, null=True)),
                ("quiet_to", models.TimeField(blank=True, null=True)),
                ("quiet_zone", models.CharField(blank=True, default="", max_length=64)),
                (
                    "run",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="rules",
                        to="runs.run",
                    ),
                ),
                ("statistic", models.CharField(blank=True, default="", max_length=64)),
                (
                    "tensors",
                    models.CharField(
                        blank=True,
                        default="",
                        help_text="A pattern such as blocks.*.input; empty: a scalar.",
                        max_length=512,
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("name", ""), _negated=True),
                        fields=("project", "name"),
                        name="rule_name_once",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Alert",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "kind",
                    models.CharField(
                        choices=KINDS,
                        max_length=32,
                    ),
                ),
                (
                    "severity",
                    models.CharField(
                        choices=[("warning", "Warning"), ("critical", "Critical")], max_length=16
                    ),
                ),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("open", "Open"),
                            ("acknowledged", "Acknowledged"),
                            ("muted", "Muted"),
                            ("resolved", "Resolved"),
                        ],
                        default="open",
                        max_length=16,
                    ),
                ),
                ("onset_step", models.BigIntegerField(help_text="The first step of the problem.")),
                ("step", models.BigIntegerField(help_text="The step at which the problem was detected.")),
                (
                    "step_time",
                    models.DateTimeField(
                        blank=True, help_text="When that step ended, by the agent's clock.", null=True
                    ),
                ),
                ("value", models.FloatField(blank=True, null=True)),
                ("threshold", models.FloatField(blank=True, null=True)),
                ("message", models.CharField(max_length=500)),
                ("evidence", models.JSONField(blank=True, default=dict)),
                ("opened_at", models.DateTimeField(default=django.utils.timezone.now)),
                ("resolved_at", models.DateTimeField(blank=True, null=True)),
                ("acknowledged_at", models.DateTimeField(blank=True, null=True)),
                (
                    "acknowledged_by",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="alerts", to="runs.run"
                    ),
                ),
                (
                    "rule",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="alerts",
                        to="alerts.rule",
                    ),
                ),
                ("generation", models.CharField(blank=True, default="", max_length=32)),
                ("seen_by", models.JSONField(blank=True, default=list)),
                ("escalated_at", models.DateTimeField(blank=True, null=True)),
                (
                    "muted_until",
                    models.DateTimeField(blank=True, help_text="Set while the state is muted.", null=True),
                ),
                ("reopened", models.PositiveIntegerField(default=0, help_text="How often it was reopened.")),
                (
                    "resolved_step",
                    models.BigIntegerField(blank=True, help_text="Where the condition ended.", null=True),
                ),
                (
                    "rule_name",
                    models.CharField(
                        blank=True, default="", help_text="Kept if the rule goes.", max_length=128
                    ),
                ),
                ("sent_again_as", models.BigIntegerField(blank=True, null=True)),
                (
                    "waiting_since",
                    models.DateTimeField(
                        default=django.utils.timezone.now,
                        help_text="When it last became open: escalation counts from here.",
                    ),
                ),
            ],
            options={
                "db_table": "alerts_event",
                "ordering": ["-opened_at"],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("run", "kind", "rule_name", "generation", "onset_step"), name="event_once"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="DetectorState",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("writer", models.UUIDField()),
                ("next_seq", models.BigIntegerField(default=0)),
                ("state", models.JSONField(default=dict, help_text="The state of each rule's detector.")),
                (
                    "rows",
                    models.BigIntegerField(
                        default=-1,
                        help_text="Only for RUN_WIDE: rows of the run and its baseline after everything was read; else -1.",
                    ),
                ),
                ("updated_at", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="detector_states",
                        to="runs.run",
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("run", "writer"), name="detector_state_once")
                ],
            },
        ),
        migrations.CreateModel(
            name="Delivery",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("attempts", models.IntegerField(default=0)),
                ("due_at", models.DateTimeField(default=django.utils.timezone.now)),
                ("claimed_at", models.DateTimeField(blank=True, null=True)),
                ("delivered_at", models.DateTimeField(blank=True, null=True)),
                (
                    "failed_at",
                    models.DateTimeField(blank=True, help_text="Set when no attempt is left.", null=True),
                ),
                ("last_error", models.CharField(blank=True, default="", max_length=500)),
                (
                    "channel",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="deliveries",
                        to="alerts.channel",
                    ),
                ),
                (
                    "event",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="deliveries",
                        to="alerts.alert",
                    ),
                ),
                (
                    "key",
                    models.UUIDField(
                        default=uuid.uuid4,
                        help_text="The same in every attempt, so that receivers drop duplicates.",
                    ),
                ),
                (
                    "reason",
                    models.CharField(
                        choices=[
                            ("opened", "Opened"),
                            ("reopened", "Reopened"),
                            ("worse", "Got worse"),
                            ("escalated", "Escalated"),
                            ("resolved", "Resolved"),
                            ("test", "Test"),
                        ],
                        default="opened",
                        max_length=16,
                    ),
                ),
                (
                    "occurrence",
                    models.PositiveIntegerField(
                        default=0,
                        help_text="Counts repetitions of a reason, e.g. of an alert that is reopened twice.",
                    ),
                ),
                (
                    "leader",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="followers",
                        to="alerts.delivery",
                    ),
                ),
                (
                    "held",
                    models.BooleanField(
                        default=False, help_text="Above the channel's limit: waits for a digest."
                    ),
                ),
            ],
            options={
                "indexes": [
                    models.Index(fields=["delivered_at", "due_at"], name="alerts_deli_deliver_94f1d5_idx")
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("event", "channel", "reason", "occurrence"), name="delivery_once"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="HistoryEntry",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "kind",
                    models.CharField(
                        choices=[
                            ("opened", "opened"),
                            ("updated", "got worse"),
                            ("acknowledged", "acknowledged"),
                            ("unacknowledged", "undid the acknowledgement"),
                            ("muted", "muted"),
                            ("unmuted", "unmuted"),
                            ("resolved", "resolved"),
                            ("reopened", "reopened"),
                            ("escalated", "escalated"),
                            ("ordered", "ordered"),
                            ("comment", "commented"),
                        ],
                        max_length=16,
                    ),
                ),
                ("at", models.DateTimeField(default=django.utils.timezone.now)),
                ("user_name", models.CharField(blank=True, default="", max_length=150)),
                ("text", models.CharField(blank=True, default="", max_length=2000)),
                (
                    "event",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="history", to="alerts.alert"
                    ),
                ),
                (
                    "user",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "ordering": ["id"],
            },
        ),
        migrations.CreateModel(
            name="RuleTrial",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("document", models.JSONField(help_text="The rule, in the form of rule_documents.py.")),
                ("runs", models.JSONField(default=list, help_text="The ids of the runs.")),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("waiting", "Waiting"),
                            ("running", "Running"),
                            ("done", "Done"),
                            ("failed", "Failed"),
                        ],
                        default="waiting",
                        max_length=16,
                    ),
                ),
                ("share", models.FloatField(default=0.0, help_text="How much is done, from 0 to 1.")),
                ("result", models.JSONField(default=list)),
                ("problem", models.CharField(blank=True, default="", max_length=500)),
                ("created_at", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "created_by",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="rule_trials",
                        to="accounts.project",
                    ),
                ),
            ],
        ),
        # Apart from the table, so that the constraint has the name that the replaced migrations gave it.
        migrations.AlterField(
            model_name="delivery",
            name="key",
            field=models.UUIDField(
                default=uuid.uuid4,
                help_text="The same in every attempt, so that receivers drop duplicates.",
                unique=True,
            ),
        ),
    ]

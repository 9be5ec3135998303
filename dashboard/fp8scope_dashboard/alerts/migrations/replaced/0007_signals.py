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

# Kinds that are new, with the severity of their default rule, and whether it is switched on.
NEW_KINDS = (
    ("tensor_not_finite", "critical", True),
    ("saturation_rise", "warning", True),
    ("underflow_rate", "warning", True),
    ("underflow_rise", "warning", True),
    ("scale_frozen", "critical", True),
    ("scale_stale", "warning", True),
    ("scale_jump", "warning", True),
    ("scale_disagreement", "critical", True),
    ("amax_growth", "warning", True),
    ("grad_norm", "warning", True),
    ("throughput_drop", "warning", True),
    ("data_wait", "warning", True),
    ("memory_creep", "warning", True),
    ("rank_behind", "warning", True),
    ("run_silent", "critical", True),
    ("run_failed", "critical", True),
    ("run_finished", "warning", False),
)


def add_rules(apps, schema_editor):
    """Give each existing project the rules that a new one begins with. Their parameters are the defaults."""
    rule_model = apps.get_model("alerts", "Rule")
    for project in apps.get_model("accounts", "Project").objects.all():
        present = set(rule_model.objects.filter(project=project, run=None).values_list("kind", flat=True))
        rule_model.objects.bulk_create(
            rule_model(project=project, kind=kind, severity=severity, enabled=enabled)
            for kind, severity, enabled in NEW_KINDS
            if kind not in present
        )


def convert_saturation(apps, schema_editor):
    """Keep what the saturation rule has seen of the runs, in the form of tensor_alarm.py."""
    rules = apps.get_model("alerts", "Rule").objects.filter(kind="saturation_rate")
    keys = {str(pk) for pk in rules.values_list("pk", flat=True)}
    for stored in apps.get_model("alerts", "DetectorState").objects.iterator():
        for key in keys & set(stored.state):
            before = stored.state[key]
            if "counts" not in before:
                continue
            onset = before["onset"] if before.get("open") else -1
            stored.state[key] = {
                "tensors": {
                    column: [count, since, -1, onset, 0, 0, peak]
                    for column, (count, since, peak) in before["counts"].items()
                },
                "groups": {str(onset): onset} if onset >= 0 and before["counts"] else {},
                "open": onset >= 0,
            }
            if before.get("last_step") is not None:
                stored.state["tensors"] = {
                    "last_step": before["last_step"],
                    "first_step": before["first_step"],
                }
            stored.save(update_fields=["state"])


class Migration(migrations.Migration):
    dependencies = [("alerts", "0006_life_of_an_alert")]

    operations = [
        migrations.AlterField(
            model_name="alert",
            name="kind",
            field=models.CharField(choices=KINDS, max_length=32),
        ),
        migrations.AlterField(
            model_name="rule",
            name="kind",
            field=models.CharField(choices=KINDS, max_length=32),
        ),
        migrations.RunPython(add_rules, migrations.RunPython.noop),
        migrations.RunPython(convert_saturation, migrations.RunPython.noop),
    ]

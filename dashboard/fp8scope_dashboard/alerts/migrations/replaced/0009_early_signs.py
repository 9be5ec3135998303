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

# Kinds that are new, and whether their default rule is switched on.
NEW_KINDS = (
    ("noise_growth", True),
    ("kurtosis_growth", True),
    ("logit_growth", True),
    ("router_collapse", True),
    ("update_growth", True),
)


def add_rules(apps, schema_editor):
    """Give each existing project the rules that a new one begins with. Their parameters are the defaults."""
    rule_model = apps.get_model("alerts", "Rule")
    for project in apps.get_model("accounts", "Project").objects.all():
        present = set(rule_model.objects.filter(project=project, run=None).values_list("kind", flat=True))
        rule_model.objects.bulk_create(
            rule_model(project=project, kind=kind, severity="warning", enabled=enabled)
            for kind, enabled in NEW_KINDS
            if kind not in present
        )


class Migration(migrations.Migration):
    dependencies = [("alerts", "0008_loss_detectors")]

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
    ]

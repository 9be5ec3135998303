from django.db import migrations
from django.utils import timezone

# Defaults that have changed. Rules store them, so they would keep the old ones.
OLD_DEFAULTS = {
    "loss_divergence": {"fraction": 0.02, "sigmas": 8.0, "points": 20, "span": 20},
    "loss_spike": {},
    "above_baseline": {},
}
# What the new detectors continue with: how far the old ones have read.
KEPT = ("last_step", "axis", "cursors")
REASON = "The rule was replaced by an update; it opens another alert if the condition lasts."


def replace_detectors(apps, schema_editor):
    """Drop the old defaults and the states of the old detectors, and resolve what only they could end."""
    rule_model, event_model = apps.get_model("alerts", "Rule"), apps.get_model("alerts", "Alert")
    kinds = {}
    for rule in rule_model.objects.filter(kind__in=OLD_DEFAULTS):
        kinds[str(rule.pk)] = rule.kind
        old = OLD_DEFAULTS[rule.kind]
        rule.parameters = {
            key: value for key, value in rule.parameters.items() if key not in old or old[key] != value
        }
        rule.save(update_fields=["parameters"])
    for detector in apps.get_model("alerts", "DetectorState").objects.iterator():
        for key in kinds.keys() & detector.state.keys():
            state = detector.state[key]
            detector.state[key] = {name: state[name] for name in KEPT if name in state}
        detector.save(update_fields=["state"])
    for event in event_model.objects.filter(kind__in=OLD_DEFAULTS).exclude(state="resolved"):
        event.state, event.resolved_at, event.seen_by = "resolved", timezone.now(), []
        event.evidence = {**event.evidence, "resolved_because": REASON}
        event.save(update_fields=["state", "resolved_at", "seen_by", "evidence"])


class Migration(migrations.Migration):
    dependencies = [("alerts", "0007_signals")]
    operations = [migrations.RunPython(replace_detectors, migrations.RunPython.noop)]

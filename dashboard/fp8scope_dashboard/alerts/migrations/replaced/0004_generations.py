from django.db import migrations, models


def note_who_sees_it(apps, schema_editor):
    """Fill in which detectors still see the condition of an unresolved event, from their states.

    Without that, nothing would resolve the event.
    """
    event_model, state_model = apps.get_model("alerts", "Alert"), apps.get_model("alerts", "DetectorState")
    writer_model = apps.get_model("runs", "Writer")
    for event in event_model.objects.exclude(state="resolved").iterator():
        writers = dict(
            writer_model.objects.filter(run=event.run_id, imported=False).values_list("uuid", "attempt")
        )
        holders, attempts = [], []
        for state in state_model.objects.filter(run=event.run_id):
            detector = state.state.get(str(event.rule_id), {})
            if not detector.get("open"):
                continue
            attempt = writers.get(state.writer)
            stream = "run/0" if attempt is None else f"{state.writer}/{attempt}"
            holders.append([stream, detector.get("onset", event.onset_step)])
            attempts.append(attempt or 0)
        if holders:
            event.seen_by, event.generation = holders, str(max(attempts))
            event.save(update_fields=["seen_by", "generation"])


class Migration(migrations.Migration):
    dependencies = [
        ("alerts", "0003_plain_labels"),
        ("runs", "0008_kin_indexes"),
    ]

    operations = [
        migrations.RemoveConstraint(model_name="alert", name="event_once"),
        migrations.AddField(
            model_name="alert",
            name="generation",
            field=models.CharField(blank=True, default="", max_length=32),
        ),
        migrations.AddField(
            model_name="alert",
            name="seen_by",
            field=models.JSONField(blank=True, default=list),
        ),
        migrations.AddConstraint(
            model_name="alert",
            constraint=models.UniqueConstraint(
                fields=["run", "kind", "generation", "onset_step"], name="event_once"
            ),
        ),
        migrations.RunPython(note_who_sees_it, migrations.RunPython.noop),
    ]

"""The places of bodies in the cold store, and the register of its files."""

from django.db import migrations, models

LOCATIONS = (
    ("tile", "Of a body in the cold store: cold_store.locations."),
    ("histogram", "As that of a tile."),
)
EMPTY = "Empty if it is in the cold store."


class Migration(migrations.Migration):
    # By the name that 0001_schema replaces: an upgrade from a database of version 0.1 has both.
    dependencies = [("telemetry", "0005_chunk_head")]

    operations = [
        *(
            migrations.AddField(model, "location", models.BinaryField(null=True, help_text=text))
            for model, text in LOCATIONS
        ),
        migrations.AlterField("tile", "body", models.BinaryField(help_text=EMPTY)),
        migrations.AlterField(
            "histogram",
            "body",
            models.BinaryField(help_text=f"Arrow IPC stream; see telemetry.histograms. {EMPTY}"),
        ),
        migrations.AddField(
            "rolling",
            "cold_due",
            # A default of the database: servers of the previous version write rows without it.
            models.BooleanField(
                db_default=True,
                help_text="Whether the run has values to move into the cold store once it is old.",
            ),
        ),
        migrations.CreateModel(
            name="ColdFile",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("run_id", models.UUIDField()),
                ("digest", models.BinaryField(help_text="The SHA-256 of the file.")),
                ("bytes", models.BigIntegerField()),
                ("bodies", models.IntegerField(help_text="The bodies that were moved into it.")),
                (
                    "state",
                    models.CharField(
                        choices=[("writing", "Writing"), ("stored", "Stored"), ("unneeded", "Unneeded")],
                        max_length=16,
                    ),
                ),
                ("changed_at", models.DateTimeField()),
            ],
            options={
                "indexes": [models.Index(fields=["state", "changed_at"], name="cold_file_state")],
                "constraints": [
                    models.UniqueConstraint(fields=("run_id", "digest"), name="cold_file_once")
                ],
            },
        ),
    ]

from django.db import migrations, models


class Migration(migrations.Migration):
    # Apart from 0007: PostgreSQL creates no index of a table in a transaction that has updated its rows.
    dependencies = [("runs", "0007_kin")]

    operations = [
        migrations.AddIndex(
            "run", models.Index(fields=["project", "baseline"], name="runs_run_project_ca9365_idx")
        ),
        migrations.AddIndex(
            "run",
            models.Index(
                fields=["project", "precision", "-created_at"], name="runs_run_project_0ea4e3_idx"
            ),
        ),
        migrations.AddIndex(
            "run",
            models.Index(
                fields=["project", "recipe_name", "-created_at"], name="runs_run_project_94e592_idx"
            ),
        ),
        migrations.AddIndex(
            "run", models.Index(fields=["project", "config_digest"], name="runs_run_project_f98257_idx")
        ),
        migrations.AddIndex(
            "run", models.Index(fields=["project", "parent"], name="runs_run_project_813db0_idx")
        ),
    ]

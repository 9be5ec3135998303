"""Hand the model Evaluation over to the app `evaluations`, which keeps the table."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("analysis", "0001_initial")]

    operations = [
        migrations.SeparateDatabaseAndState(state_operations=[migrations.DeleteModel("Evaluation")])
    ]

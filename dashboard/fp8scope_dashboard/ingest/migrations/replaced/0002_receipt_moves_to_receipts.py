"""Hand the model Receipt over to the app `receipts`, which keeps the table."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("ingest", "0001_initial")]

    operations = [
        migrations.SeparateDatabaseAndState(state_operations=[migrations.DeleteModel("Receipt")])
    ]

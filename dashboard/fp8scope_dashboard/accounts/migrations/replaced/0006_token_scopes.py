import django.contrib.postgres.fields
import fp8scope_dashboard.accounts.models
from django.db import migrations, models


def keep_reading(apps, schema_editor):
    """Tokens of version 0.1 go on to do what `fp8scope export`, `report` and `rules export` need."""
    apps.get_model("accounts", "ApiToken").objects.update(scopes=["write", "read"])


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0005_time_zone_and_default_baseline'),
    ]

    operations = [
        migrations.AddField(
            model_name='apitoken',
            name='scopes',
            field=django.contrib.postgres.fields.ArrayField(base_field=models.CharField(choices=[('write', 'write runs'), ('read', 'read'), ('administer', 'administer')], max_length=16), default=fp8scope_dashboard.accounts.models.default_scopes, size=None),
        ),
        migrations.RunPython(keep_reading, migrations.RunPython.noop),
    ]

"""The places of an experiment's files, and the data sets of a run."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('mlflow_tracking', '0001_schema'),
    ]

    operations = [
        migrations.AddField(
            model_name='mlflowexperiment',
            name='artifact_location',
            field=models.CharField(blank=True, db_default='', default='', max_length=1024),
        ),
        migrations.AddField(
            model_name='mlflowrun',
            name='datasets',
            field=models.JSONField(blank=True, db_default=[], default=list),
        ),
    ]

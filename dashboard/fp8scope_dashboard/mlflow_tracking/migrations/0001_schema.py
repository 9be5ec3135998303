"""The experiments of MLflow's clients, and what these ask back of a run."""

import django.db.models.deletion
import django.utils.timezone
import uuid
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    # By the name that 0001_schema of accounts replaces, as in the migrations of runs.
    dependencies = [
        ("accounts", "0007_projects_and_density"),
        ("runs", "0002_margin_in_nats"),
    ]

    operations = [
        migrations.CreateModel(
            name='MlflowExperiment',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=500)),
                ('tags', models.JSONField(blank=True, default=dict)),
                ('deleted_at', models.DateTimeField(blank=True, null=True)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('updated_at', models.DateTimeField(auto_now=True)),
                ('project', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='mlflow_experiments', to='accounts.project')),
            ],
        ),
        migrations.CreateModel(
            name='MlflowRun',
            fields=[
                ('run', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='mlflow', serialize=False, to='runs.run')),
                ('user_id', models.CharField(blank=True, default='', max_length=256)),
                ('status', models.CharField(default='RUNNING', max_length=16)),
                ('start_time', models.BigIntegerField(default=0)),
                ('end_time', models.BigIntegerField(blank=True, null=True)),
                ('params', models.JSONField(blank=True, default=dict)),
                ('tags', models.JSONField(blank=True, default=dict)),
                ('metrics', models.JSONField(blank=True, default=dict)),
                ('loss_key', models.CharField(blank=True, default='', max_length=250)),
                ('writer', models.UUIDField(default=uuid.uuid4)),
                ('next_seq', models.BigIntegerField(default=0)),
                ('rows_sent', models.BigIntegerField(default=0)),
                ('points_sent', models.BigIntegerField(default=0)),
                ('experiment', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='runs', to='mlflow_tracking.mlflowexperiment')),
            ],
        ),
        migrations.AddConstraint(
            model_name='mlflowexperiment',
            constraint=models.UniqueConstraint(fields=('project', 'name'), name='mlflow_experiment_name'),
        ),
    ]

"""Logins that read the SQL views, and the history of scalars as arrays. The views are made after all migrations."""

import django.contrib.postgres.fields
import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('accounts', '0002_gpu_hour_price'),
        ('runs', '0002_margin_in_nats'),
    ]

    operations = [
        migrations.CreateModel(
            name='HistoryState',
            fields=[
                ('run', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='+', serialize=False, to='runs.run')),
                ('rows_stored', models.BigIntegerField(help_text='Of the run when it was copied.')),
                ('copied_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('seconds', models.FloatField(default=0.0, help_text='The duration of the copy.')),
            ],
        ),
        migrations.CreateModel(
            name='SqlReader',
            fields=[
                ('role', models.CharField(help_text='The name of the login.', max_length=63, primary_key=True, serialize=False)),
                ('seconds', models.PositiveIntegerField(default=30, help_text='The longest statement.')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('project', models.ForeignKey(blank=True, help_text='None: all.', null=True, on_delete=django.db.models.deletion.CASCADE, related_name='+', to='accounts.project')),
            ],
        ),
        migrations.CreateModel(
            name='ScalarHistory',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.TextField()),
                ('thinned', models.BooleanField(help_text='Whether steps are missing among the points.')),
                ('steps', django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), size=None)),
                ('times', django.contrib.postgres.fields.ArrayField(base_field=models.DateTimeField(null=True), size=None)),
                ('values', django.contrib.postgres.fields.ArrayField(base_field=models.FloatField(), size=None)),
                ('stride', models.BigIntegerField(help_text='Steps of a bucket.')),
                ('ends', django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), help_text='The last step of each bucket.', size=None)),
                ('means', django.contrib.postgres.fields.ArrayField(base_field=models.FloatField(), size=None)),
                ('lasts', django.contrib.postgres.fields.ArrayField(base_field=models.FloatField(), size=None)),
                ('counts', django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), size=None)),
                ('run', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='+', to='runs.run')),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('run', 'name'), name='scalar_history_once')],
            },
        ),
    ]

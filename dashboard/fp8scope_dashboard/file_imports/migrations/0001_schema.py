"""Uploaded files, their imports, and the token of a project's imports."""

import django.db.models.deletion
import django.utils.timezone
import uuid
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('accounts', '0002_gpu_hour_price'),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name='ImportAccess',
            fields=[
                ('project', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='+', serialize=False, to='accounts.project')),
                ('token', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='accounts.apitoken')),
            ],
        ),
        migrations.CreateModel(
            name='ImportJob',
            fields=[
                ('id', models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ('title', models.CharField(help_text='The names of the files.', max_length=200)),
                ('bytes', models.BigIntegerField(help_text='Of the files as they were uploaded.')),
                ('options', models.JSONField(default=dict, help_text='Of the importer: group, baseline, precision, format.')),
                ('state', models.CharField(choices=[('waiting', 'Waiting'), ('running', 'Running'), ('done', 'Done'), ('failed', 'Failed')], default='waiting', max_length=16)),
                ('attempts', models.PositiveIntegerField(default=0)),
                ('claim', models.UUIDField(blank=True, null=True)),
                ('stage', models.CharField(blank=True, default='', max_length=200)),
                ('share', models.FloatField(default=0.0, help_text='How much of the present file is done, from 0 to 1.')),
                ('results', models.JSONField(default=list, help_text='[id of the run, what was stored of it].')),
                ('notes', models.JSONField(default=list, help_text='What the importer has said beside its errors.')),
                ('problems', models.JSONField(default=list, help_text='Sentences of the importer, or of the job.')),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('seen_at', models.DateTimeField(default=django.utils.timezone.now, help_text='Last sign of life of the worker.')),
                ('finished_at', models.DateTimeField(blank=True, null=True)),
                ('created_by', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('project', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='accounts.project')),
            ],
            options={
                'ordering': ['-created_at'],
            },
        ),
        migrations.CreateModel(
            name='ImportChunk',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=255)),
                ('number', models.PositiveIntegerField(help_text="In the order of the job's chunks.")),
                ('body', models.BinaryField()),
                ('job', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='chunks', to='file_imports.importjob')),
            ],
        ),
        migrations.AddIndex(
            model_name='importjob',
            index=models.Index(fields=['project', '-created_at'], name='import_by_time'),
        ),
        migrations.AddConstraint(
            model_name='importchunk',
            constraint=models.UniqueConstraint(fields=('job', 'number'), name='import_chunk_once'),
        ),
    ]

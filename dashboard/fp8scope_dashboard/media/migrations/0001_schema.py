"""Media of runs, and the contents of projects that they name."""

import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('accounts', '0004_sign_in'),
        ('runs', '0003_owner'),
    ]

    operations = [
        migrations.CreateModel(
            name='MediaContent',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('sha256', models.BinaryField(max_length=32)),
                ('size', models.BigIntegerField()),
                ('type', models.CharField(blank=True, default='', max_length=16)),
                ('width', models.PositiveIntegerField(blank=True, null=True)),
                ('height', models.PositiveIntegerField(blank=True, null=True)),
                ('stored_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('project', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='accounts.project')),
            ],
        ),
        migrations.CreateModel(
            name='MediaChunk',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.PositiveIntegerField()),
                ('body', models.BinaryField()),
                ('content', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='chunks', to='media.mediacontent')),
            ],
        ),
        migrations.CreateModel(
            name='MediaItem',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=128)),
                ('kind', models.CharField(choices=[('image', 'Image'), ('text', 'Text'), ('table', 'Table'), ('file', 'File')], max_length=8)),
                ('step', models.BigIntegerField()),
                ('caption', models.CharField(blank=True, default='', max_length=500)),
                ('file_name', models.CharField(blank=True, default='', max_length=255)),
                ('received_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('content', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='items', to='media.mediacontent')),
                ('run', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='media', to='runs.run')),
                ('writer', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='+', to='runs.writer')),
            ],
            options={
                'ordering': ['name', 'step', 'id'],
            },
        ),
        migrations.AddConstraint(
            model_name='mediacontent',
            constraint=models.UniqueConstraint(fields=('project', 'sha256'), name='media_content_once'),
        ),
        migrations.AddConstraint(
            model_name='mediachunk',
            constraint=models.UniqueConstraint(fields=('content', 'number'), name='media_chunk_once'),
        ),
        migrations.AddIndex(
            model_name='mediaitem',
            index=models.Index(fields=['run', 'name', 'step'], name='media_by_name'),
        ),
    ]

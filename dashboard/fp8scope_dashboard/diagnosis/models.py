"""The stored diagnosis of a run."""

from django.db import models
from django.utils import timezone

from fp8scope_dashboard.runs.models import Run


class Diagnosis(models.Model):
    """The latest diagnosis of a run. One row a run, overwritten."""

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="diagnosis")
    outcome = models.CharField(max_length=16, help_text="cause, not_fp8, suspect, clear or unknown")
    cause = models.CharField(max_length=32, blank=True, default="", help_text="A key of conclusion.CAUSES.")
    sentence = models.CharField(max_length=1000)
    result = models.JSONField(help_text="conclusion.Conclusion as a dict, with method_version")
    inputs = models.CharField(max_length=128, help_text="Summary of the inputs; see reading.inputs_of.")
    seconds = models.FloatField(default=0.0)
    diagnosed_at = models.DateTimeField(default=timezone.now)

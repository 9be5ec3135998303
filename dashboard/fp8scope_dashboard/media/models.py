"""The stored contents of a project, and the media of its runs that name them."""

from typing import ClassVar

from django.db import models
from django.utils import timezone

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.runs.models import Run, Writer


class MediaKind(models.TextChoices):
    IMAGE = "image"
    TEXT = "text"
    TABLE = "table"
    FILE = "file"


class MediaContent(models.Model):
    """Bytes that are stored once in a project, however many runs name them.

    `type` is one of `sniffing.IMAGE_TYPES` if the bytes are such an image, else empty: what a client claims
    of a content is not stored.
    """

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="+")
    sha256 = models.BinaryField(max_length=32)
    size = models.BigIntegerField()
    type = models.CharField(max_length=16, blank=True, default="")
    width = models.PositiveIntegerField(null=True, blank=True)
    height = models.PositiveIntegerField(null=True, blank=True)
    stored_at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["project", "sha256"], name="media_content_once"),
        ]


class MediaChunk(models.Model):
    """A part of a content, in the order of `number`."""

    content = models.ForeignKey(MediaContent, on_delete=models.CASCADE, related_name="chunks")
    number = models.PositiveIntegerField()
    body = models.BinaryField()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["content", "number"], name="media_chunk_once"),
        ]


class MediaItem(models.Model):
    """A content under a name at a step of a run."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="media")
    writer = models.ForeignKey(Writer, on_delete=models.CASCADE, related_name="+")
    content = models.ForeignKey(MediaContent, on_delete=models.CASCADE, related_name="items")
    name = models.CharField(max_length=128)
    kind = models.CharField(max_length=8, choices=MediaKind)
    step = models.BigIntegerField()
    caption = models.CharField(max_length=500, blank=True, default="")
    file_name = models.CharField(max_length=255, blank=True, default="")
    received_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering: ClassVar = ["name", "step", "id"]
        indexes: ClassVar = [models.Index(fields=["run", "name", "step"], name="media_by_name")]

    @property
    def hex(self) -> str:
        """The SHA-256 of the content, in hexadecimal."""
        return bytes(self.content.sha256).hex()

"""Runs, the tensors they observe, and the processes that write to them."""

import uuid
from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models.functions import Now
from django.utils import timezone

from fp8scope_dashboard.accounts.models import ApiToken, Project, User


class RunState(models.TextChoices):
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    # No writer was heard from for runs.services.SILENT_AFTER: killed, or without a connection.
    SILENT = "silent"


class Relation(models.TextChoices):
    """A relation of a run to its parent."""

    # It went on from a checkpoint of its parent, under an id of its own.
    RESUMED = "resumed"
    # It trains on the same batches as a part of its parent, in another precision.
    REFERENCE = "reference"


class KeptRuns(models.Manager["Run"]):
    """Excludes runs that are being deleted, which are hidden everywhere."""

    def get_queryset(self) -> models.QuerySet["Run"]:
        return super().get_queryset().filter(deleted_at=None)


HIGH_PRECISIONS = ("bf16", "fp16", "fp32")


class Run(models.Model):
    """A training run. The agent chooses its id, so that registering it twice creates one run.

    Runs of the same `group` differ only in their seed. `baseline` is what this run is compared with: the name
    of a group of the same project, or the id of a run of it. It is empty for a baseline itself. Both are the
    agent's, unless a person has chosen others (see `Choice`). `parent` is the id of another run, as the agent
    sent it: no such run may be stored.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="runs")
    name = models.CharField(max_length=200)
    state = models.CharField(max_length=16, choices=RunState.choices, default=RunState.RUNNING)
    precision = models.CharField(max_length=32, default="unknown", help_text="bf16, fp8, fp16, fp32, unknown")
    recipe = models.JSONField(default=dict, blank=True)
    config = models.JSONField(default=dict, blank=True)
    environment = models.JSONField(default=dict, blank=True)
    summary = models.JSONField(
        default=dict, blank=True, help_text="Results of the whole run, set by the training script."
    )
    tags = ArrayField(models.CharField(max_length=64), default=list, blank=True)
    group = models.CharField(max_length=128, blank=True, default="")
    baseline = models.CharField(max_length=128, blank=True, default="")
    # The latest baseline that the agent named, and when the process that named it began.
    agent_baseline = models.CharField(max_length=128, blank=True, default="", db_default="")
    agent_baseline_at = models.DateTimeField(null=True, blank=True)
    parent = models.CharField(max_length=128, blank=True, default="", db_default="")
    relation = models.CharField(
        max_length=16, choices=Relation.choices, blank=True, default="", db_default=""
    )
    seed = models.BigIntegerField(null=True, blank=True)
    total_steps = models.BigIntegerField(null=True, blank=True)

    # Derived from `recipe` and `config`, for searching; see runs.configuration.
    recipe_name = models.CharField(max_length=64, blank=True, default="", db_default="")
    config_digest = models.CharField(max_length=64, blank=True, default="", db_default="")

    created_at = models.DateTimeField(default=timezone.now)
    heartbeat_at = models.DateTimeField(default=timezone.now)
    finished_at = models.DateTimeField(null=True, blank=True)
    error = models.TextField(blank=True, default="", help_text="Traceback of a failed run, from the agent.")

    # Shown in the header of the run page; ingest updates them in the transaction that stores the data.
    last_step = models.BigIntegerField(null=True, blank=True)
    rows_stored = models.BigIntegerField(default=0)
    points_stored = models.BigIntegerField(default=0)
    # The latest value of each scalar; NaN and infinities are the strings of docs/wire.md.
    last_scalars = models.JSONField(default=dict, blank=True)
    statistics = ArrayField(models.CharField(max_length=32), default=list, blank=True)
    # Counted by the agent: rows that it dropped, and internal errors that it kept from the training code.
    rows_dropped = models.BigIntegerField(default=0)
    agent_errors = models.BigIntegerField(default=0)
    # Sums of what finished writers sent; equal to *_stored unless something was lost.
    rows_sent = models.BigIntegerField(null=True, blank=True)
    points_sent = models.BigIntegerField(null=True, blank=True)

    # A token that may only write runs reads those that it registered.
    registered_with = models.ForeignKey(
        ApiToken, null=True, blank=True, editable=False, on_delete=models.SET_NULL, related_name="+"
    )

    # The person whose token registered the run. It stays theirs if somebody takes over the token.
    owner = models.ForeignKey(
        User, null=True, blank=True, editable=False, on_delete=models.SET_NULL, related_name="+"
    )

    # Set when a person deletes the run; telemetry.deletion then deletes its data in small transactions.
    deleted_at = models.DateTimeField(null=True, blank=True, editable=False)
    deleted_bytes = models.BigIntegerField(default=0, help_text="Size of the run when its deletion began.")
    # Until then the deletion can be undone and no data is deleted; None if the deletion has begun.
    erase_at = models.DateTimeField(null=True, blank=True, editable=False)
    # Set when a person archives the run: the list of runs shows it only if asked to.
    archived_at = models.DateTimeField(null=True, blank=True, editable=False)
    # A member's choice among the twelve colours of runs, from 1; None: the colour that follows from the id.
    colour = models.PositiveSmallIntegerField(null=True, blank=True)
    # A member's choice for the comparison of this run and its seeds; None: the project's margin.
    margin = models.FloatField(null=True, blank=True)
    # The same in the unit of the loss, in its place.
    margin_nats = models.FloatField(null=True, blank=True)

    objects: ClassVar[models.Manager["Run"]] = KeptRuns()
    with_deleted: ClassVar[models.Manager["Run"]] = models.Manager()

    class Meta:
        ordering: ClassVar = ["-created_at"]
        base_manager_name = "with_deleted"
        indexes: ClassVar = [
            # The list is ordered, and its groups are counted, from this index alone: rows are wide.
            models.Index(
                fields=["project", "-created_at", "id"],
                include=["group", "archived_at"],
                condition=models.Q(deleted_at=None),
                name="run_order",
            ),
            models.Index(fields=["project", "group"]),
            models.Index(fields=["project", "baseline"]),
            models.Index(fields=["project", "precision", "-created_at"]),
            models.Index(fields=["project", "recipe_name", "-created_at"]),
            models.Index(fields=["project", "config_digest"]),
            models.Index(fields=["project", "parent"]),
            # Counts of the list of runs are read from this index alone: rows are wide, with configurations.
            models.Index(
                "project",
                "precision",
                "state",
                "recipe_name",
                "archived_at",
                condition=models.Q(deleted_at=None),
                name="run_counts",
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def equivalence_margin(self) -> float:
        """The relative difference of the loss below which this run counts as equivalent to its baseline.

        A margin in nats becomes one at the baseline's last compared loss; before there is one, the project's.
        """
        if self.margin_nats is not None:
            comparison = getattr(self, "comparison", None)
            level = None if comparison is None else comparison.result.get("baseline_loss")
            return min(self.margin_nats / abs(level), 1.0) if level else self.project.margin
        return self.project.margin if self.margin is None else self.margin

    @property
    def is_high_precision(self) -> bool:
        """Return whether the run is known to quantise nothing."""
        return self.precision in HIGH_PRECISIONS


class Choice(models.Model):
    """A baseline or a group that a person has chosen for a run, in place of the agent's.

    The latest one that is not undone counts. Choices for several runs that were made at once share `act`, and
    are undone together.
    """

    class Field(models.TextChoices):
        BASELINE = "baseline"
        GROUP = "group"

    act = models.UUIDField(default=uuid.uuid4, db_index=True)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="choices")
    field = models.CharField(max_length=16, choices=Field.choices)
    value = models.CharField(max_length=128, blank=True, default="")
    suggested = models.BooleanField(default=False, help_text="The page had suggested it.")
    chosen_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    chosen_at = models.DateTimeField(default=timezone.now)
    undone_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    undone_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering: ClassVar = ["-id"]
        indexes: ClassVar = [models.Index(fields=["run", "field", "-id"])]


class Note(models.Model):
    """A note of people about a run, in Markdown. `version` rises with each change."""

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="note")
    text = models.TextField(blank=True, default="")
    version = models.PositiveIntegerField(default=0)
    edited_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    edited_at = models.DateTimeField(default=timezone.now)


class StepNote(models.Model):
    """A short plain note of a person at a step of a run, which its charts mark."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="step_notes")
    step = models.BigIntegerField()
    text = models.CharField(max_length=1000)
    written_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    written_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering: ClassVar = ["step", "id"]
        indexes: ClassVar = [models.Index(fields=["run", "step"], name="step_note_by_step")]

    @property
    def by(self) -> str:
        """The author after a comma, for titles; empty for one who has gone."""
        return f", {self.written_by.username}" if self.written_by is not None else ""

    @property
    def anchor(self) -> str:
        """The id of its element on the run's page."""
        return f"step-note-{self.pk}"


class Artefact(models.Model):
    """A link to something that belongs to a run, such as a checkpoint or a log, in a place of its own.

    Of a link that the training script has sent, `writer` is the process, and `added_by` is None.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="artefacts")
    name = models.CharField(max_length=128)
    address = models.CharField(max_length=1000, help_text="http, https, s3, gs or file.")
    step = models.BigIntegerField(null=True, blank=True)
    writer = models.UUIDField(null=True, blank=True)
    added_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    added_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering: ClassVar = ["id"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["run", "address"], name="artefact_once"),
        ]

    @property
    def is_web(self) -> bool:
        """Return whether a browser can open it."""
        return self.address.lower().startswith(("http://", "https://"))


class ConsoleLine(models.Model):
    """A line of the console log of a process, in its last state. `number` counts the lines of the process."""

    class Stream(models.TextChoices):
        STDOUT = "stdout"
        STDERR = "stderr"
        # A remark of the agent, such as how many lines are left out.
        AGENT = "agent"

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="console_lines")
    writer = models.ForeignKey("runs.Writer", on_delete=models.CASCADE, related_name="console_lines")
    number = models.BigIntegerField()
    time = models.DateTimeField()
    step = models.BigIntegerField(default=0)
    stream = models.CharField(max_length=8, choices=Stream.choices, default=Stream.STDOUT)
    text = models.TextField(blank=True, default="")
    received_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering: ClassVar = ["writer", "number"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["writer", "number"], name="console_line_once"),
        ]


class BulkAction(models.Model):
    """A change that a person made to several runs at once, and that can be undone; see runs.bulk."""

    class Kind(models.TextChoices):
        TAG = "tag"
        UNTAG = "untag"
        ARCHIVE = "archive"
        UNARCHIVE = "unarchive"
        DELETE = "delete"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="bulk_actions")
    kind = models.CharField(max_length=16, choices=Kind.choices)
    tag = models.CharField(max_length=64, blank=True, default="")
    # Only the runs that the action has changed.
    runs = ArrayField(models.UUIDField())
    done_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    done_at = models.DateTimeField(default=timezone.now)
    undone_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    undone_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering: ClassVar = ["-done_at"]
        indexes: ClassVar = [models.Index(fields=["project", "-done_at"])]


class SavedView(models.Model):
    """A named state of a page: of the list of runs, or of the charts of a run.

    Of the list it has search, columns, order and grouping as the `query` of its address; of the charts, the
    `panels` in their order. Only its owner sees it, unless it is shared with the project. The default of the
    project is what people see who have no view of their own.
    """

    class Page(models.TextChoices):
        RUNS = "runs"
        CHARTS = "charts"

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="saved_views")
    owner = models.ForeignKey(User, on_delete=models.CASCADE, related_name="+")
    name = models.CharField(max_length=80)
    page = models.CharField(max_length=16, choices=Page.choices, default=Page.RUNS, db_default=Page.RUNS)
    query = models.CharField(max_length=2000, blank=True, default="")
    panels = models.JSONField(default=list, blank=True, db_default=models.Value([], models.JSONField()))
    shared = models.BooleanField(default=False)
    is_default = models.BooleanField(default=False, db_default=False)
    created_at = models.DateTimeField(default=timezone.now)
    changed_at = models.DateTimeField(default=timezone.now, db_default=Now())

    class Meta:
        ordering: ClassVar = ["name", "id"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["project", "owner", "page", "name"], name="saved_view_once"),
            models.UniqueConstraint(
                fields=["project", "page"],
                condition=models.Q(is_default=True),
                name="saved_view_default_once",
            ),
        ]


class DeletedRun(models.Model):
    """The id of a deleted run, so that an agent that still sends cannot create it again."""

    run_id = models.UUIDField(primary_key=True)
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="deleted_runs")
    deleted_at = models.DateTimeField(default=timezone.now)


class Tensor(models.Model):
    """An observed tensor of a run. `index` is its row in heat maps, in order of registration."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="tensors")
    index = models.IntegerField()
    name = models.CharField(max_length=512, help_text="<module path>.<role>")
    module = models.CharField(max_length=512)
    role = models.CharField(max_length=32, help_text="input, weight, grad_output, ...")
    format = models.CharField(max_length=16, help_text="e4m3, e5m2, ...")
    shape = models.JSONField(default=list)
    numel = models.BigIntegerField(default=0)

    class Meta:
        ordering: ClassVar = ["index"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["run", "index"], name="tensor_index_once"),
            models.UniqueConstraint(fields=["run", "name"], name="tensor_name_once"),
        ]


class Writer(models.Model):
    """A process (rank) that writes to a run.

    `attempt` counts the starts of the run: when it resumes or goes back to an earlier step, it gets new
    writers with the next number. All ranks of an attempt share the number. `first_step` and `last_step` are
    the stored steps; `failed` and `error` say how the process ended.

    `catalogue[j]` is the Tensor.index of column j in the tensor lists of the writer. Each writer numbers its
    tensors in its own order, because it writes before it has a connection to the server.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="writers")
    uuid = models.UUIDField()
    rank = models.IntegerField(default=0)
    hostname = models.CharField(max_length=255, blank=True, default="")
    attempt = models.IntegerField(default=0)
    # Written by `fp8scope import`; alert rules judged the data where it was recorded.
    imported = models.BooleanField(default=False)
    first_step = models.BigIntegerField(null=True, blank=True)
    last_step = models.BigIntegerField(null=True, blank=True)
    catalogue = ArrayField(models.IntegerField(), default=list, blank=True)
    created_at = models.DateTimeField(default=timezone.now)
    seen_at = models.DateTimeField(default=timezone.now)
    finished_at = models.DateTimeField(null=True, blank=True)
    failed = models.BooleanField(default=False)
    error = models.TextField(blank=True, default="")
    # Latest counts of the agent in this process; the run has their sums.
    rows_dropped = models.BigIntegerField(default=0)
    errors = models.BigIntegerField(default=0)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["run", "uuid"], name="writer_once"),
        ]

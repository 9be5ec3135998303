"""The JSON request and response bodies of docs/wire.md, as in the OpenAPI document.

Unknown fields are ignored, so that an older dashboard accepts messages of a newer agent.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from ninja import Schema
from pydantic import AfterValidator, AwareDatetime, ConfigDict, Field, FiniteFloat, model_validator

from fp8scope_dashboard.wire import limits


def _storable(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain NUL characters")
    return text


NO_NUL = r"^[^\u0000]*$"
Text = Annotated[str, AfterValidator(_storable), Field(json_schema_extra={"pattern": NO_NUL})]
Label = Annotated[Text, Field(max_length=128)]
Name = Annotated[Text, Field(min_length=1, max_length=512)]
Natural = Annotated[int, Field(ge=0, le=limits.MAX_INT)]
Count = Annotated[int, Field(ge=0, le=limits.MAX_COUNT)]
Seq = Annotated[int, Field(ge=0, le=limits.MAX_SEQ)]
# -1 is a size that is known only at run time.
Size = Annotated[int, Field(ge=-1, le=limits.MAX_INT)]
Seed = Annotated[int, Field(ge=-limits.MAX_INT - 1, le=limits.MAX_INT)]


class RunIn(Schema):
    name: Annotated[Text, Field(min_length=1, max_length=200)]
    precision: Annotated[Text, Field(max_length=32)] = "unknown"
    recipe: dict[str, Any] = {}
    config: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    tags: Annotated[list[Annotated[Text, Field(max_length=64)]], Field(max_length=100)] = []
    group: Label = ""
    baseline: Label = ""
    parent: Label = ""
    relation: Literal["", "resumed", "reference"] = ""
    seed: Seed | None = None
    total_steps: Natural | None = None
    created_at: AwareDatetime | None = None
    summary: dict[str, Any] = {}
    replace_tags: bool = False


class RunRegistered(Schema):
    id: UUID
    project: str
    url: str
    state: str
    margin: float
    # The kinds of reports that were added since agents ask for them, and that this server accepts.
    accepts: list[str] = []


class TensorIn(Schema):
    name: Name
    module: Annotated[Text, Field(max_length=512)] = ""
    role: Annotated[Text, Field(max_length=32)] = ""
    format: Annotated[Text, Field(max_length=16)] = ""
    shape: Annotated[list[Size], Field(max_length=32)] = []
    numel: Natural = 0


class CatalogueIn(Schema):
    rank: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    hostname: Annotated[Text, Field(max_length=255)] = ""
    attempt: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    imported: bool = False
    offset: Natural = 0
    tensors: Annotated[list[TensorIn], Field(max_length=limits.TENSORS_PER_REQUEST)]


class CatalogueLength(Schema):
    count: int


class MediaIn(Schema):
    """The first line of a message with media; the content follows."""

    writer: UUID
    seq: Natural
    step: Natural
    name: Annotated[Text, Field(min_length=1, max_length=128)]
    kind: Literal["image", "text", "table", "file"]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    size: Annotated[int, Field(ge=1, le=limits.MAX_INT)]
    caption: Annotated[Text, Field(max_length=500)] = ""
    file_name: Annotated[Text, Field(max_length=255)] = ""


class MediaOut(Schema):
    """A media of a run. `url` is the address of its content, for browsers of members."""

    id: int
    name: str
    kind: Literal["image", "text", "table", "file"]
    step: int
    rank: int
    caption: str
    file_name: str
    type: str = Field(description="Of an image that a page shows, such as image/png; empty for others.")
    width: int | None
    height: int | None
    size: int
    sha256: str
    received_at: datetime
    url: str


class MediaListOut(Schema):
    items: list[MediaOut]
    more: bool = Field(description="Whether there are others; ask again with `after`, the id of the last.")


SCORE_PRECISIONS = (None, "bf16", "fp8", "fp16", "fp32")
MATRIX_PRECISIONS = (
    *("bf16", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "fp8-delayed"),
    *("fp6", "int8", "int4", "nvfp4"),
)
"""In the order in which they are shown."""
PRECISIONS = tuple(dict.fromkeys((*filter(None, SCORE_PRECISIONS), *MATRIX_PRECISIONS)))


class MatrixIn(Schema):
    """One precision of the evaluation matrix: bytes, seconds, and layers quantised and left."""

    weight_bytes: Annotated[int, Field(ge=0, le=limits.MAX_INT)]
    model_bytes: Annotated[int, Field(ge=0, le=limits.MAX_INT)]
    seconds: Annotated[FiniteFloat, Field(ge=0)]
    layers: Annotated[int, Field(ge=0, le=limits.MAX_INT)] = 0
    left: Annotated[int, Field(ge=0, le=limits.MAX_INT)] = 0


def _precision_by_matrix(schema: dict[str, Any]) -> None:
    """Say in the schema which precisions go with a matrix, and which without."""
    schema["if"] = {"required": ["matrix"], "properties": {"matrix": {"type": "object"}}}
    schema["then"] = {
        "required": ["precision"],
        "properties": {"precision": {"enum": list(MATRIX_PRECISIONS)}},
    }
    schema["else"] = {"properties": {"precision": {"enum": list(SCORE_PRECISIONS)}}}


class EvaluationIn(Schema):
    model_config = ConfigDict(json_schema_extra=_precision_by_matrix)

    writer: UUID
    seq: Seq
    step: Natural
    name: Annotated[Text, Field(min_length=1, max_length=128)]
    metric: Annotated[Text, Field(min_length=1, max_length=64)]
    kind: Literal["proportion", "mean"]
    higher_is_better: bool = True
    items: Annotated[list[FiniteFloat], Field(min_length=1, max_length=limits.EVALUATION_ITEMS)]
    # As long as items, like clusters. Items of a proportion are 0 or 1.
    item_ids: Annotated[list[Label], Field(json_schema_extra={"uniqueItems": True})] | None = None
    clusters: list[Label] | None = None
    # With `matrix` one of MATRIX_PRECISIONS, else of SCORE_PRECISIONS.
    precision: Annotated[str, Field(json_schema_extra={"enum": [*PRECISIONS]})] | None = None
    margin: Annotated[FiniteFloat, Field(gt=0)] | None = None
    matrix: MatrixIn | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for field in ("item_ids", "clusters"):
            names = getattr(self, field)
            if names is not None and len(names) != len(self.items):
                raise ValueError(f"{field} must be as long as items")
        if self.item_ids is not None and len(set(self.item_ids)) != len(self.item_ids):
            raise ValueError("item_ids must be distinct")
        if self.kind == "proportion" and any(item not in (0, 1) for item in self.items):
            raise ValueError("items of a proportion must be 0 or 1")
        allowed = SCORE_PRECISIONS if self.matrix is None else MATRIX_PRECISIONS
        if self.precision not in allowed:
            raise ValueError(f"precision must be among {', '.join(filter(None, allowed))}")
        return self


class HeartbeatIn(Schema):
    writer: UUID
    dropped: Count = 0
    errors: Count = 0
    pending: Count = 0


class FinishIn(Schema):
    writer: UUID
    seq: Seq
    state: Literal["finished", "failed"] = "finished"
    ends_run: bool = True
    error: Annotated[Text, Field(max_length=100_000)] = ""
    rows_sent: Count = 0
    points_sent: Count = 0
    dropped: Count = 0
    errors: Count = 0
    # By the clock that the run's created_at is from; None from agents that do not send it.
    finished_at: AwareDatetime | None = None


class Alert(Schema):
    id: int
    kind: str
    rule: str = ""
    severity: str
    step: int
    onset_step: int
    value: float | None
    threshold: float | None
    message: str
    opened_at: datetime


class Command(Schema):
    id: int
    kind: str
    arguments: dict[str, Any]
    reason: str
    given_by: str
    expires_in: float


class Receipt(Schema):
    status: Literal["stored", "duplicate"]
    seq: int
    rows: int = 0
    points: int = 0
    pause: float | None = Field(
        None, description="Of a batch: the seconds after which the writer's next one suits the server."
    )
    alerts: list[Alert] = []
    commands: list[Command] = []


class Pulse(Schema):
    state: str
    alerts: list[Alert] = []
    commands: list[Command] = []


class NoteOut(Schema):
    text: str
    edited_by: str
    edited_at: datetime


class StepNoteOut(Schema):
    step: int
    text: str
    written_by: str
    written_at: datetime


class ArtefactOut(Schema):
    name: str
    address: str
    step: int | None
    added_by: str
    added_at: datetime


class WriterPositionOut(Schema):
    """The stored part of a writer: the number of its next message, and its rows and points."""

    next_seq: int
    rows: int
    points: int
    # Null if no such writer is there.
    attempt: int | None


class AttemptOut(Schema):
    """A start of the training: its processes and hosts, and the steps that they have stored."""

    attempt: int
    processes: int
    hosts: list[str]
    first_step: int | None
    last_step: int | None
    started_at: datetime
    seen_at: datetime


class RunOut(Schema):
    id: UUID
    name: str
    project: str
    owner: str | None = Field(description="User name of the person whose token registered the run.")
    state: str
    failure: str
    precision: str
    group: str
    baseline: str
    parent: str
    relation: str
    recipe: dict[str, Any]
    last_step: int | None
    last_attempt: int | None
    attempts: list[AttemptOut]
    seed: int | None
    total_steps: int | None
    statistics: list[str]
    created_at: datetime
    heartbeat_at: datetime
    finished_at: datetime | None
    archived_at: datetime | None
    rows_stored: int
    points_stored: int
    rows_sent: int | None
    points_sent: int | None
    rows_dropped: int
    agent_errors: int
    tags: list[str]
    config: dict[str, Any]
    summary: dict[str, Any]
    comparison: dict[str, Any] | None
    evaluations: list[dict[str, Any]]
    evaluations_summary: dict[str, Any] | None
    events: list[Alert]
    note: NoteOut | None
    step_notes: list[StepNoteOut]
    artefacts: list[ArtefactOut]
    url: str


class RunSummary(Schema):
    id: UUID
    name: str
    state: str
    precision: str
    recipe: dict[str, Any]
    group: str
    baseline: str
    parent: str
    relation: str
    seed: int | None
    tags: list[str]
    last_step: int | None
    created_at: datetime


class MatrixColumnOut(Schema):
    precision: str
    weight_bytes: int
    model_bytes: int
    seconds: float
    layers: int
    left: int


class MatrixTaskOut(Schema):
    name: str
    metric: str
    kind: str
    higher_is_better: bool
    cells: dict[str, dict[str, Any]]


class EvaluationMatrixOut(Schema):
    run: UUID
    step: int
    alpha: float
    columns: list[MatrixColumnOut]
    tasks: list[MatrixTaskOut]


class Deletion(Schema):
    done: bool
    share: float
    bytes_left: int


class ErrorDetail(Schema):
    code: str
    message: str
    hint: str


class ErrorOut(Schema):
    error: ErrorDetail

"""The bounded documents of POST /runs/{run}/reports. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias
from uuid import UUID

from ninja import Schema
from pydantic import AfterValidator, AwareDatetime, Field, FiniteFloat, model_validator

from fp8scope_dashboard.control.imported_history import PastAlert, PastCommand
from fp8scope_dashboard.runs.notes import ADDRESS_LENGTH, NAME_LENGTH
from fp8scope_dashboard.text.markdown import MAX_CHARACTERS
from fp8scope_dashboard.text.terminal import as_printed
from fp8scope_dashboard.wire import limits
from fp8scope_dashboard.wire.schemas import Natural, Seq, Text

MAX_PRODUCTS = 2_000
MAX_WINDOW_STEPS = 1_000
MAX_LAYERS = 500
MAX_COMMANDS = 32
MAX_MESSAGE = 500

# As everywhere on the wire, values that JSON has no number for are strings.
Number: TypeAlias = FiniteFloat | Literal["NaN", "Infinity", "-Infinity"]
Path = Annotated[Text, Field(max_length=512)]
Message = Annotated[Text, Field(max_length=MAX_MESSAGE)]
Word = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]


class _ReportIn(Schema):
    writer: UUID
    seq: Seq
    step: Natural = 0


class ProductError(Schema):
    layer: Path
    product: Literal["fprop", "dgrad", "wgrad"]
    relative_error: Number
    cosine: Number


class BisectIn(_ReportIn):
    """Errors of the full gradient with one matrix product at a time in FP8, largest first."""

    kind: Literal["bisect"]
    products: Annotated[list[ProductError], Field(min_length=1, max_length=MAX_PRODUCTS)]
    measured: Natural
    total_error: Number
    total_cosine: Number
    loss_bf16: Number
    loss_fp8: Number
    seconds: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    note: Message = ""


class ReferenceIn(_ReportIn):
    """The losses of the same batches in both precisions from the same state; `step` is the first step."""

    kind: Literal["reference"]
    bf16: Annotated[list[Number], Field(min_length=2, max_length=MAX_WINDOW_STEPS)]
    fp8: Annotated[list[Number], Field(min_length=2, max_length=MAX_WINDOW_STEPS)]
    delta: Number
    noise: Number
    tolerance: Annotated[FiniteFloat, Field(gt=0)]
    verdict: Literal["within", "over"]
    policy: Literal["report", "fallback"] = "report"
    action: Literal["", "fallback"] = ""
    layers: Natural = 0
    kept_bytes: Natural = 0
    seconds: Annotated[FiniteFloat, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if len(self.bf16) != len(self.fp8):
            raise ValueError("bf16 and fp8 must have the same number of losses")
        return self


class Incident(Schema):
    """An incident that the flight recorder of a process has kept, on the disk of its host."""

    reason: Annotated[Text, Field(max_length=32)]
    alert: Natural | None = None
    target: Natural
    first_step: Natural
    last_step: Natural
    snapshots: Annotated[list[Natural], Field(max_length=16)] = []
    folder: Annotated[Text, Field(max_length=512)]
    host: Annotated[Text, Field(max_length=255)] = ""
    rank: Natural = 0
    bytes: Natural = 0


class ArtefactIn(Schema):
    """A link to something of the run that is kept elsewhere; runs.notes checks the address."""

    name: Annotated[Text, Field(min_length=1, max_length=NAME_LENGTH)]
    address: Annotated[Text, Field(min_length=1, max_length=ADDRESS_LENGTH)]


class AnnotationIn(_ReportIn):
    """A note on a change to the run at a step, an incident that was kept, or a link to an artefact."""

    kind: Literal["annotation"]
    name: Word
    text: Annotated[Text, Field(min_length=1, max_length=MAX_MESSAGE)]
    why: Message = ""
    layers: Annotated[list[Path], Field(max_length=MAX_LAYERS)] = []
    incident: Incident | None = None
    artefact: ArtefactIn | None = None


class CommandResultIn(_ReportIn):
    """The result of a command."""

    kind: Literal["command"]
    command: Natural
    state: Literal["accepted", "done", "refused", "failed"]
    message: Message = ""


class AcceptsIn(_ReportIn):
    """The commands that the writer accepts from now on."""

    kind: Literal["accepts"]
    accepts: Annotated[list[Word], Field(max_length=MAX_COMMANDS)]


class ConsoleLineIn(Schema):
    """A line of the console log; one with a known number replaces it. `time` may be in Unix seconds.

    Escape sequences and control characters of `text` are carried out or left out, as by a terminal.
    """

    number: Natural
    time: AwareDatetime
    step: Natural = 0
    stream: Literal["stdout", "stderr", "agent"] = "stdout"
    text: Annotated[str, Field(max_length=limits.CONSOLE_LINE_LENGTH), AfterValidator(as_printed)]


class ConsoleIn(_ReportIn):
    """Lines of the writer's console log."""

    kind: Literal["console"]
    lines: Annotated[list[ConsoleLineIn], Field(min_length=1, max_length=limits.CONSOLE_LINES)]


class PastNote(Schema):
    """The note of an imported run, or one at a step of it."""

    text: Annotated[Text, Field(max_length=MAX_CHARACTERS)]
    edited_by: Annotated[Text, Field(max_length=150)] = ""
    edited_at: AwareDatetime
    step: Natural | None = None


class PastNoteIn(_ReportIn):
    """A note of an imported run. A note of the run that somebody has written there since is kept."""

    kind: Literal["past_note"]
    note: PastNote


class PastArtefact(ArtefactIn):
    """A link of an imported run."""

    step: Natural | None = None
    added_by: Annotated[Text, Field(max_length=150)] = ""
    added_at: AwareDatetime


class PastArtefactIn(_ReportIn):
    """A link of an imported run."""

    kind: Literal["past_artefact"]
    artefact: PastArtefact


class PastAlertIn(_ReportIn):
    """An alert of an imported run."""

    kind: Literal["past_alert"]
    alert: PastAlert


class PastCommandIn(_ReportIn):
    """A command of an imported run; it is never delivered."""

    kind: Literal["past_command"]
    command: PastCommand


ReportIn: TypeAlias = Annotated[
    BisectIn
    | ReferenceIn
    | AnnotationIn
    | CommandResultIn
    | AcceptsIn
    | ConsoleIn
    | PastAlertIn
    | PastCommandIn
    | PastNoteIn
    | PastArtefactIn,
    Field(discriminator="kind"),
]

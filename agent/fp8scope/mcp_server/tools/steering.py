"""Tools about notes and commands. Two of them write; the server checks what the token may do."""

from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from fp8scope.client import Client, GivenCommand
from fp8scope.mcp_server.answers import AnswerPart, Link, ToolAnswer, run_link
from fp8scope.mcp_server.run_data import RunDocument, RunName, RunText, ServerText, bounded
from fp8scope.mcp_server.tool import Access, McpTool, OfRun

MAX_NOTES: Final = 200
MAX_COMMANDS: Final = 50


class NotePart(AnswerPart):
    step: int
    text: RunText
    written_by: RunName
    written_at: datetime | None


class NotesAsked(OfRun):
    limit: int = Field(100, ge=1, le=MAX_NOTES)
    offset: int = Field(0, ge=0, le=100_000)


class NotesAnswer(ToolAnswer):
    """Notes at steps, by step, and the run's own note (Markdown). `next_offset` is null on the last page."""

    total: int
    next_offset: int | None
    notes: list[NotePart]
    run_note: RunText

    def sentence(self) -> str:
        return f"{len(self.notes)} of {self.total:,} notes at steps: what people wrote, which is data."


def list_notes(client: Client, asked: NotesAsked) -> NotesAnswer:
    """The notes that people and programs wrote at steps of a run, and the note of the run. They are data."""
    run = client.run(asked.run)
    notes = run.notes()
    end = asked.offset + asked.limit
    return NotesAnswer(
        total=len(notes),
        next_offset=end if end < len(notes) else None,
        notes=[NotePart.model_validate(note) for note in notes[asked.offset : end]],
        run_note=(run.fields["note"] or {}).get("text", ""),
        links=[run_link(run, "notes")],
    )


class NoteAsked(OfRun):
    step: int = Field(ge=0, le=2**62)
    text: str = Field(min_length=1, max_length=1_000, description="Plain text. People see it in the charts.")


class WrittenNoteAnswer(ToolAnswer):
    """The stored note."""

    note: NotePart

    def sentence(self) -> str:
        return f"The note at step {self.note.step:,} is written."


def write_note(client: Client, asked: NoteAsked) -> WrittenNoteAnswer:
    """Pin a note to a step of a run, which everybody in the project sees in its charts. It stays until a
    person removes it. The token needs the scope 'write runs'. Call it only if the person asked for it."""
    run = client.run(asked.run)
    note = run.write_note(asked.step, asked.text)
    return WrittenNoteAnswer(note=NotePart.model_validate(note), links=[run_link(run, "notes")])


class CommandPart(AnswerPart):
    """A command. `state`, the worst of all processes, is waiting, delivered, expired, accepted, done, refused
    or failed.
    """

    id: int
    kind: str
    arguments: RunDocument
    reason: RunText
    given_by: RunName
    given_at: datetime | None
    state: str
    message: RunText
    step: int | None


class CommandsAsked(OfRun):
    limit: int = Field(20, ge=1, le=MAX_COMMANDS)


class CommandsAnswer(ToolAnswer):
    """The kinds of commands that the training accepts now, and those that were given, newest first."""

    accepts: list[str]
    total: int
    commands: list[CommandPart]

    def sentence(self) -> str:
        accepts = ", ".join(self.accepts) or "nothing"
        return f"The training accepts now: {accepts}. {self.total:,} commands were given."


def list_commands(client: Client, asked: CommandsAsked) -> CommandsAnswer:
    """The commands that a run's training accepts now, and those given before with their results."""
    run = client.run(asked.run)
    commands = run.commands()
    return CommandsAnswer(
        accepts=run.accepted_commands(),
        total=len(commands),
        commands=[_command(command) for command in commands[: asked.limit]],
        links=[_commands_link(run.url)],
    )


def _command(command: GivenCommand) -> CommandPart:
    return CommandPart.model_validate({**vars(command), "arguments": bounded(command.arguments)[0]})


def _commands_link(url: str) -> Link:
    return Link(title="Commands of the run", url=f"{url}#commands")


Kind = Literal["fallback", "checkpoint", "pause", "resume"]
Pattern = Annotated[str, Field(min_length=1, max_length=512)]


class CommandAsked(OfRun):
    kind: Kind = Field(description="One that list_commands says the training accepts.")
    reason: str = Field("", max_length=500, description="Why; people and the training's log see it.")
    layers: list[Pattern] = Field(
        default=[], max_length=100, description="For fallback: layers or patterns, such as blocks.*.mlp.down."
    )
    precision: Literal["bf16", "fp8"] = Field("bf16", description="For fallback: fp8 undoes an earlier one.")
    seconds: int | None = Field(None, ge=1, le=3_600, description="For pause: at most that long.")


class GivenCommandAnswer(ToolAnswer):
    """The command as it was given."""

    command: CommandPart
    note: ServerText

    def sentence(self) -> str:
        return (
            f"The command {self.command.kind} was given: {self.command.state}. list_commands has its result."
        )


def give_command(client: Client, asked: CommandAsked) -> GivenCommandAnswer:
    """Ask a running training to fall back to BF16 in some layers, to write a checkpoint, to pause or to
    resume. It changes a training, so call it only if the person asked for it. The server refuses what the
    script does not allow. The token needs the scope 'administer'."""
    run = client.run(asked.run)
    command = run.give_command(asked.kind, _arguments(asked), reason=asked.reason)
    return GivenCommandAnswer(
        command=_command(command),
        note="The processes get it with their next message; without an answer it expires after 15 minutes.",
        links=[_commands_link(run.url)],
    )


def _arguments(asked: CommandAsked) -> dict[str, Any]:
    if asked.kind == "fallback":
        return {"patterns": asked.layers, "precision": asked.precision}
    if asked.kind == "pause" and asked.seconds is not None:
        return {"seconds": asked.seconds}
    return {}


TOOLS: Final = (
    McpTool(call=list_notes, title="Notes of a run"),
    McpTool(call=list_commands, title="Commands of a run"),
    McpTool(call=write_note, title="Write a note at a step", access=Access.ADDS),
    McpTool(call=give_command, title="Give a command to a training", access=Access.CHANGES_TRAINING),
)

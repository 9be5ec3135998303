"""A tool: a function of the client and of checked arguments, with the schemas of both sides."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, get_type_hints

import mcp_types as types
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fp8scope.client import Client, ClientError
from fp8scope.config import ConfigurationError
from fp8scope.mcp_server.answers import ToolAnswer
from fp8scope.mcp_server.run_data import clean

MAX_ANSWER_BYTES: Final = 512 << 10
"""A larger answer is refused: it would fill a model's memory."""
MAX_ERROR: Final = 1_000
OTHER_VERSION: Final = (
    "The server's answer has another form than expected: install one version of fp8scope on both."
)


class Access(Enum):
    """Effect of a tool on the project."""

    READS = "reads"
    ADDS = "adds"
    CHANGES_TRAINING = "changes training"


class Arguments(BaseModel):
    """The arguments of a tool. Unknown ones are an error: a misspelt filter would select too much."""

    model_config = ConfigDict(extra="forbid")


class OfRun(Arguments):
    """Arguments of tools about one run."""

    run: str = Field(
        min_length=1, max_length=512, description="The id of a run, or its exact name (the newest)."
    )


def _untitled(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without the titles that repeat names: a model pays for each word of it."""
    plain: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties" or key == "$defs":
            plain[key] = {name: _untitled(entry) for name, entry in value.items()}
        elif key in ("anyOf", "prefixItems"):
            plain[key] = [_untitled(entry) for entry in value]
        elif key != "title":
            plain[key] = _untitled(value) if isinstance(value, dict) and key != "default" else value
    return plain


class ToolRefusalError(Exception):
    """The tool gives no answer; the message says why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class McpTool:
    """A tool. Its name and description are those of the function."""

    call: Callable[[Client, Any], ToolAnswer]
    title: str
    access: Access = Access.READS

    @property
    def name(self) -> str:
        """The name."""
        return self.call.__name__

    def described(self) -> types.Tool:
        """The tool as a client lists it."""
        hints = get_type_hints(self.call)
        reads = self.access is Access.READS
        return types.Tool(
            name=self.name,
            title=self.title,
            description=" ".join((self.call.__doc__ or "").split()),
            input_schema=_untitled(hints["asked"].model_json_schema()),
            output_schema=_untitled(hints["return"].model_json_schema(mode="serialization")),
            annotations=types.ToolAnnotations(
                title=self.title,
                read_only_hint=reads,
                destructive_hint=self.access is Access.CHANGES_TRAINING,
                idempotent_hint=reads,
                open_world_hint=False,
            ),
        )

    def answer(self, client: Client, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The short text and the structured content.

        Raises:
            ToolRefusalError: wrong arguments, a server that refuses or is away, an answer of no use.
        """
        try:
            asked = get_type_hints(self.call)["asked"].model_validate(arguments)
        except ValidationError as error:
            raise ToolRefusalError(f"Wrong arguments. {_problems(error)}") from error
        try:
            answer = self.call(client, asked)
        except (ClientError, ConfigurationError) as error:
            raise ToolRefusalError(clean(error, MAX_ERROR)) from error
        except (ValidationError, KeyError) as error:
            raise ToolRefusalError(OTHER_VERSION) from error
        size = len(answer.model_dump_json())
        if size > MAX_ANSWER_BYTES:
            raise ToolRefusalError(
                f"The answer has {size:,} bytes, and {MAX_ANSWER_BYTES:,} are allowed. Ask for fewer: a "
                "smaller limit, fewer points, or a filter."
            )
        return answer.sentence(), answer.model_dump(mode="json")


def _problems(error: ValidationError) -> str:
    """The problems of arguments by name, without the values, which may be long."""
    problems = []
    for problem in error.errors(include_url=False, include_context=False, include_input=False)[:10]:
        name = clean(".".join(map(str, problem["loc"])), 100)
        problems.append(f"{name}: {problem['msg']}." if name else f"{problem['msg']}.")
    return " ".join(problems)

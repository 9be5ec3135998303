"""The tool about media: their names, with links. Contents are for people, and data of runs."""

from typing import Final

from pydantic import Field

from fp8scope.client import Client
from fp8scope.mcp_server.answers import AnswerPart, ToolAnswer, run_link
from fp8scope.mcp_server.run_data import RunName
from fp8scope.mcp_server.tool import McpTool, OfRun

MAX_NAMES: Final = 64


class MediaPart(AnswerPart):
    """The media of one name."""

    name: RunName
    kind: str = Field(description="image, text, table or file.")
    items: int
    first_step: int
    last_step: int
    url: str = Field(description="The address of the last one, for people.")


class MediaAnswer(ToolAnswer):
    """Names of media; their contents are not read."""

    media: list[MediaPart]

    def sentence(self) -> str:
        total = sum(part.items for part in self.media)
        return f"{total:,} images, texts, tables and files under {len(self.media)} names."


def list_media(client: Client, asked: OfRun) -> MediaAnswer:
    """Names of the images, texts, tables and files that a run has logged, with their steps and links."""
    run = client.run(asked.run)
    parts: dict[str, MediaPart] = {}
    for item in run.media():
        part = parts.get(item.name)
        if part is None:
            parts[item.name] = MediaPart(
                name=item.name,
                kind=item.kind,
                items=1,
                first_step=item.step,
                last_step=item.step,
                url=item.url,
            )
            continue
        part.items += 1
        part.first_step = min(part.first_step, item.step)
        if item.step >= part.last_step:
            part.last_step, part.url = item.step, item.url
    return MediaAnswer(media=list(parts.values())[:MAX_NAMES], links=[run_link(run, "media")])


TOOLS: Final = (McpTool(call=list_media, title="Media of a run"),)

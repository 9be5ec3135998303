"""The media of a run: images, texts, tables and files at a step."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fp8scope.client.connection import ClientError, Connection
from fp8scope.client.fields import read_object

A_PAGE = 1_000


@dataclass(frozen=True, kw_only=True)
class StoredMedia:
    """A media of a run; its content is read when it is asked for.

    Attributes:
        kind: image, text, table or file.
        type: of an image that pages show, such as image/png; empty for others.
        url: the address of the content for people who are signed in.
    """

    id: int
    name: str
    kind: str
    step: int
    rank: int
    caption: str
    file_name: str
    type: str
    width: int | None
    height: int | None
    size: int
    sha256: str
    received_at: str
    url: str
    read: Callable[[int], bytes] = field(repr=False, compare=False)

    def content(self) -> bytes:
        """The bytes, as they were logged."""
        return self.read(self.id)

    def text(self) -> str:
        """The text of a text."""
        return self.content().decode()

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """The columns and the rows of a table. Raises ClientError for other kinds."""
        if self.kind != "table":
            raise ClientError(f"{self.name!r} is no table, but of the kind {self.kind}.")
        document = json.loads(self.content())
        return document["columns"], document["rows"]


def read_media(connection: Connection, path: str, query: dict[str, Any]) -> Iterator[StoredMedia]:
    """All media that a query finds, in the order in which they were stored."""
    after = 0
    while True:
        answer = connection.json(path, {**query, "after": after, "limit": A_PAGE})
        rows = answer["items"]
        for row in rows:
            yield read_object(StoredMedia, row, read=lambda number: connection.content(f"{path}/{number}"))
        if not answer["more"]:
            return
        after = rows[-1]["id"]

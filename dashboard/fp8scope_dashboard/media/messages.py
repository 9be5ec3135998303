"""The message of a media: a line of JSON, then the content."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from fp8scope_dashboard.media import limits
from fp8scope_dashboard.media.services import NewMedia
from fp8scope_dashboard.wire.errors import InvalidError, MalformedError, TooLargeError
from fp8scope_dashboard.wire.schemas import MediaIn

CONTENT_TYPE: Final = "application/vnd.fp8scope.media"


@dataclass(frozen=True)
class MediaMessage:
    """A message with media. `line` is its JSON: with the hash of the content it identifies the message."""

    head: MediaIn
    line: bytes
    media: NewMedia


def read_message(body: bytes) -> MediaMessage:
    """Read a message: `{"writer": …, "sha256": …} \\n content`; the content may be left out.

    Raises:
        MalformedError, InvalidError, TooLargeError: what is wrong with it.
    """
    line, newline, content = body.partition(b"\n")
    if len(line) > limits.HEAD_BYTES:
        raise MalformedError(
            f"The first line has more than {limits.HEAD_BYTES:,} bytes.", "Begin with one line of JSON."
        )
    try:
        head = MediaIn.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "The first line"
        raise InvalidError(f"{field}: {first['msg']}"[:500], "See docs/wire.md.") from error
    if head.size > limits.FILE_BYTES:
        raise TooLargeError(
            f"A content may have {limits.FILE_BYTES:,} bytes, this one has {head.size:,}.",
            "Keep it elsewhere and link it by log_artefact, or raise FP8SCOPE_MEDIA_FILE_MIB of the server.",
        )
    sha256, sent = bytes.fromhex(head.sha256), content if newline and content else None
    if sent is not None and (len(sent) != head.size or hashlib.sha256(sent).digest() != sha256):
        raise InvalidError(
            "The content has another size or SHA-256 than the message says.", "Send it as it was hashed."
        )
    media = NewMedia(
        name=head.name,
        kind=head.kind,
        step=head.step,
        sha256=sha256,
        body=sent,
        caption=head.caption,
        file_name=head.file_name,
    )
    return MediaMessage(head, line, media)

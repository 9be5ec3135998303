"""HTML without the white space that a browser does not show: tests do not depend on a template's lines."""

from __future__ import annotations

import re
from typing import Any, Final

from django.http import HttpResponseBase
from django.test import Client

BLOCKS: Final = (
    "address article aside blockquote body caption col colgroup datalist dd details dialog div dl dt fieldset"
    " figcaption figure footer form h1 h2 h3 h4 head header hr html legend li link main meta nav noscript ol"
    " optgroup option p picture section select source summary table tbody td tfoot th thead title tr ul"
).replace(" ", "|")
VERBATIM: Final = re.compile(r"(<(pre|textarea|script|style)\b.*?</\2>)", re.DOTALL)
TAG: Final = re.compile(r"<[^<>]*?>")
BESIDE_BLOCK: Final = re.compile(rf"\s*(</?(?:{BLOCKS})(?:\s[^<>]*)?>)\s*")
INSIDE_BUTTON: Final = re.compile(r"(<button\b[^<>]*>)\s+|\s+(?=</button>)")


def as_shown(html: str) -> str:
    """Collapse white space as a browser does, and remove it beside blocks and at the edges of buttons."""
    parts = VERBATIM.split(html)
    # Of each three parts the second is verbatim, and the third the name of its tag.
    return "".join(
        part if index % 3 == 1 else _collapse(part) for index, part in enumerate(parts) if index % 3 != 2
    )


def _collapse(html: str) -> str:
    html = re.sub(r"[ \t\r\n]+", " ", html)
    html = TAG.sub(lambda tag: re.sub(r" (?=/?>$)", "", tag[0]), html)
    html = INSIDE_BUTTON.sub(lambda match: match[1] or "", html)
    return BESIDE_BLOCK.sub(r"\1", html)


class ShownClient(Client):
    """A client whose answers have HTML `as_shown`."""

    def request(self, **request: Any) -> Any:
        answer: HttpResponseBase = super().request(**request)
        if not answer.streaming and answer.get("Content-Type", "").startswith("text/html"):
            answer.content = as_shown(answer.content.decode()).encode()  # type: ignore[attr-defined]
        return answer

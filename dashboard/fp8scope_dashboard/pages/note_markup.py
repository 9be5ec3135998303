"""Notes of people as HTML: CommonMark with tables. Raw HTML, images and scripts in links are not rendered."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from django.utils.safestring import SafeString, mark_safe
from markdown_it import MarkdownIt

# A page of a run has headings of its own: the first level of a note comes below them.
HEADING_OFFSET: Final = 2
LINK_SCHEMES: Final = frozenset({"http", "https", "mailto", ""})


def rendered(text: str) -> SafeString:
    """A note as HTML. Every character that is not markup is escaped."""
    # With `html` off, markdown-it escapes all tags, so that only its own elements are in the result.
    return mark_safe(str(_MARKDOWN.render(text)))


def is_safe_link(address: str) -> bool:
    """Whether a link may be rendered: to the web, by mail, or within this server."""
    try:
        return urlsplit(address.strip()).scheme.lower() in LINK_SCHEMES
    except ValueError:
        return False


class _Markdown(MarkdownIt):
    def validateLink(self, url: str) -> bool:
        """The hook of markdown-it for the addresses of links."""
        return is_safe_link(url)


def _markdown() -> MarkdownIt:
    parser = _Markdown("commonmark", {"html": False, "linkify": False})
    parser.enable(["table", "strikethrough"]).disable("image")

    def lower_headings(state: object) -> None:
        for token in getattr(state, "tokens", []):
            if token.type in ("heading_open", "heading_close"):
                token.tag = f"h{min(6, int(token.tag[1]) + HEADING_OFFSET)}"
            for child in token.children or []:
                if child.type == "link_open":
                    child.attrSet("rel", "noopener nofollow")

    parser.core.ruler.push("fp8scope", lower_headings)
    return parser


_MARKDOWN: Final = _markdown()

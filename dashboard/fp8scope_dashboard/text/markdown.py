"""Markdown that people write, as safe HTML."""

from __future__ import annotations

from functools import cache
from typing import Final

from markdown_it import MarkdownIt

MAX_CHARACTERS: Final = 20_000


@cache
def _parser() -> MarkdownIt:
    # Raw HTML is shown as text, and addresses that run scripts are refused by the parser. Images are left
    # out: they would tell another server who reads the page.
    options = {"html": False, "linkify": False, "typographer": False, "maxNesting": 20}
    parser = MarkdownIt("commonmark", options).enable(["table", "strikethrough"])
    return parser.disable(["image", "html_inline", "html_block"])


def to_html(text: str, *, first_heading: int = 1) -> str:
    """CommonMark with tables as HTML, without scripts, images or raw HTML.

    Links do not pass on the address of the page. Text beyond MAX_CHARACTERS is cut. `first_heading` is the
    level of headings that the text calls the first: a part of a page must not have the level of its title.
    """
    tokens = _parser().parse(text[:MAX_CHARACTERS])
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + first_heading - 1)}"
    html: str = _parser().renderer.render(tokens, _parser().options, {})
    return html.replace("<a href=", '<a rel="nofollow noopener noreferrer" href=')

"""Markdown that people write, as safe HTML."""

from __future__ import annotations

from functools import cache
from typing import Final

from markdown_it import MarkdownIt

MOST_CHARACTERS: Final = 20_000


@cache
def _parser() -> MarkdownIt:
    # Raw HTML is shown as text, and addresses that run scripts are refused by the parser. Images are left
    # out: they would tell another server who reads the page.
    options = {"html": False, "linkify": False, "typographer": False, "maxNesting": 20}
    parser = MarkdownIt("commonmark", options).enable(["table", "strikethrough"])
    return parser.disable(["image", "html_inline", "html_block"])


def to_html(text: str) -> str:
    """CommonMark with tables as HTML, without scripts, images or raw HTML.

    Links do not pass on the address of the page. Text beyond MOST_CHARACTERS is cut.
    """
    html: str = _parser().render(text[:MOST_CHARACTERS])
    return html.replace("<a href=", '<a rel="nofollow noopener noreferrer" href=')

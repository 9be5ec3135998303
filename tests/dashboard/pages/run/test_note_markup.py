"""Notes as HTML: nothing that people write can run or load anything."""

from __future__ import annotations

import re

import pytest

from fp8scope_dashboard.pages.run.tabs import note_html

ALLOWED = {
    "p",
    "strong",
    "em",
    "code",
    "pre",
    "a",
    "h3",
    "h4",
    "h5",
    "h6",
    "ul",
    "ol",
    "li",
    "blockquote",
    "hr",
}
ALLOWED |= {"table", "thead", "tbody", "tr", "th", "td", "br", "s"}


def test_it_works() -> None:
    html = note_html(
        "# Seen\n\n**Saturates** from [240](https://x.test/a?b=1&c=2)\n\n| a | b |\n|-|-|\n| 1 | 2 |\n"
    )
    assert "<h3>Seen</h3>" in html and "<strong>Saturates</strong>" in html and "<td>1</td>" in html
    assert 'href="https://x.test/a?b=1&amp;c=2"' in html and 'rel="nofollow noopener noreferrer"' in html


HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "text <b onclick='x()'>b</b>",
    "![picture](https://x.test/track.png)",
    "[a](javascript:alert(1))",
    "[a](JaVaScRiPt:alert(1))",
    "[a](data:text/html;base64,PHNjcmlwdD4=)",
    "[a](vbscript:x)",
    "[a](file:///etc/passwd)",
    "<javascript:alert(1)>",
    "[a]: javascript:alert(1)\n\n[a]",
    "<iframe src='https://x.test'></iframe>",
    "`</code><script>`",
    '[x](https://x.test/"onmouseover=alert(1))',
    "&lt;script&gt;alert(1)",
    "<!-- --><style>*{}</style>",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_renders_only_its_own_elements(text: str) -> None:
    html = note_html(text)
    tags = re.findall(r"<\s*/?\s*([a-zA-Z0-9]+)([^>]*)>", html)
    assert {name.lower() for name, _ in tags} <= ALLOWED
    for _, attributes in tags:
        names = set(re.findall(r"([\w-]+)=", re.sub(r'"[^"]*"', '""', attributes)))
        assert names <= {"href", "rel", "title", "class", "style", "start"}, attributes
    assert not re.search(r'href="\s*(javascript|vbscript|data|file):', html, re.IGNORECASE)


def test_deep_nesting_is_bounded() -> None:
    assert len(note_html(">" * 5_000 + " deep")) < 100_000

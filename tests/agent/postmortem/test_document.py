"""A post-mortem as Markdown and as HTML."""

import math
from xml.etree import ElementTree

from fp8scope.postmortem.document import DocumentEvent, PostMortem
from fp8scope.postmortem.figure import DocumentFigure

CHART = DocumentFigure("1", "loss <of> a & b", [1, 2, 3], [2.0, math.nan, 1.0], mark=2)
REPORT = PostMortem(
    title="Post-mortem: <script>alert(1)</script>",
    facts=[("Run", "a | b")],
    signs=[DocumentEvent(3, "loss went from 2 to 9")],
    alerts=[DocumentEvent(None, "critical [x](http://y)")],
    replay=["It parts."],
    products=[("blocks.0", "dgrad", "99%")],
    figures=[CHART],
)


def test_html_shows_every_part_as_text() -> None:
    page = REPORT.html()
    assert "<script>" not in page and "&lt;script&gt;" in page
    for text in ("step 3: loss went from 2 to 9", "a | b", "blocks.0", "It parts."):
        assert text in page
    assert "Commands and changes" not in page
    assert page.count("<svg") == 1


def test_markdown_escapes_what_has_a_meaning() -> None:
    text = REPORT.markdown("pm-")
    assert "| Run | a \\| b |" in text
    assert "\\<script\\>" in text and "\\[x\\](http://y)" in text
    assert "](pm-1.svg)" in text
    assert text.index("Onset, in order") < text.index("Alerts") < text.index("Replay") < text.index("Figures")


def test_a_chart_is_well_formed_whatever_its_values() -> None:
    for values in ([2.0, math.nan, 1.0], [math.nan] * 3, [1.0, 1.0, 1.0], [math.inf, -1e300, 1e300]):
        root = ElementTree.fromstring(DocumentFigure("1", "t <&>", [1, 2, 3], values, mark=2).svg())
        marks = [each for each in root if each.tag.endswith("circle")]
        assert len(marks) == sum(not math.isfinite(value) for value in values)

"""Media on the pages: runs beside each other, step by step, and contents that no browser runs."""

from __future__ import annotations

import pytest
from dashboard.helpers.logged_media import log, picture, table
from dashboard.helpers.recording import Recorder, make_run
from dashboard.helpers.visitors import Visitor, html, run_html

from fp8scope_dashboard.pages.media.text_differences import MAX_WORDS, marked

HTML = b"<script>alert(1)</script>"


@pytest.fixture
def pair(viewer: Visitor) -> tuple[Recorder, Recorder]:
    """A BF16 run and an FP8 run that is compared with it."""
    bf16 = make_run(viewer.project, "bf16 <b>", precision="bf16", group="bf16", seed=1)
    fp8 = make_run(viewer.project, "fp8", precision="fp8", baseline="bf16", seed=1)
    return Recorder(run=bf16), Recorder(run=fp8)


def test_it_works(viewer: Visitor, pair: tuple[Recorder, Recorder]) -> None:
    bf16, fp8 = pair
    assert "No media yet" in run_html(viewer, fp8.run, "?tab=media")
    for step in (10, 20):
        log(bf16, "sample", b"The cat sat on the mat %d" % step, step=step, caption="<i>prompt</i>")
    log(fp8, "sample", b"The cat ate <b> on the mat 10", step=10)
    page = run_html(viewer, fp8.run, "?tab=media&step=10")
    assert page.index("bf16 &lt;b&gt;") < page.index("The first 2 of 10 words are the same.")
    assert "<mark>ate" in page and "The cat sat on the mat 10</div>" in page and "&lt;i&gt;prompt" in page
    assert "step 10, 1 of 2" in page
    # Without a step the last; the run without one there shows its earlier one, and says so.
    page = run_html(viewer, fp8.run, "?tab=media")
    assert "step 20, 2 of 2" in page and "None at this step: that of step 10." in page
    part = html(viewer, f"media/?runs={bf16.run.pk}&runs={fp8.run.pk}&name=sample&at=0", hx_target="media")
    assert part.lstrip().startswith("<section") and "step 10, 1 of 2" in part
    page = html(viewer, f"compare/?runs={bf16.run.pk}&runs={fp8.run.pk}")
    assert f'hx-get="/p/research/media/?runs={bf16.run.pk}&amp;runs={fp8.run.pk}"' in page


def test_a_difference_far_down_is_shown_above_the_text() -> None:
    long = "Once upon a time. " * 30
    assert marked(long + "cat", long + "<b>").first == (
        "…Once upon a time. Once upon a time. Once upon a time. <mark>&lt;b&gt;</mark>"
    )
    assert marked("cat" + long, "dog" + long).first == marked(long, long).first == ""


def test_wrong_addresses_show_what_there_is(viewer: Visitor, pair: tuple[Recorder, Recorder]) -> None:
    log(pair[1], "sample", b"text")
    for query in ("name=none", "at=99999", "at=x", "step=-1", "step=" + "9" * 30, "runs=x", "at=0&last=0"):
        part = html(viewer, f"media/?runs={pair[1].run.pk}&{query}", hx_target="media")
        assert "sample" in part and "step 1" in part


def test_tables_images_and_files(viewer: Visitor, pair: tuple[Recorder, Recorder]) -> None:
    bf16, fp8 = pair
    log(fp8, "scores", table(["task", "<u>"], [["a", None], ["b", 0.5]] * 150), kind="table")
    page = run_html(viewer, fp8.run, "?tab=media&name=scores")
    assert "&lt;u&gt;" in page and "<td>0.5</td>" in page and "100 more rows" in page
    for recorder, seed in ((bf16, 1), (fp8, 2)):
        log(recorder, "picture", picture(seed=seed), kind="image")
    page = run_html(viewer, fp8.run, "?tab=media&name=picture")
    assert page.count('class="media__image"') == 2 and page.count("Difference from the first run") == 1
    log(fp8, "page", HTML, kind="file", file_name="a.html")
    page = run_html(viewer, fp8.run, "?tab=media&name=page")
    assert "a.html" in page and HTML.decode() not in page and "Download" in page


def test_a_content_is_shown_only_if_it_is_an_image(viewer: Visitor, pair: tuple[Recorder, Recorder]) -> None:
    image = log(pair[1], "p", picture(), kind="image")
    page = log(pair[1], "h", HTML, kind="file", file_name='../x"\r\ny.html')
    text = log(pair[1], "t", HTML)
    for item, kind, how in (
        (image, "image/png", 'inline; filename="p.png"'),
        (page, "application/octet-stream", 'attachment; filename="_x_y.html"'),
        (text, "application/octet-stream", 'attachment; filename="t"'),
    ):
        answer = viewer.client.get(viewer.address(f"runs/{pair[1].run.pk}/media/{item.pk}"))
        assert (answer["Content-Type"], answer["Content-Disposition"]) == (kind, how)
        assert (
            answer["X-Content-Type-Options"] == "nosniff" and "sandbox" in answer["Content-Security-Policy"]
        )
        assert "default-src 'none'" in answer["Content-Security-Policy"]
    address = viewer.address(f"runs/{pair[1].run.pk}/media/{image.pk}")
    assert viewer.client.get(f"{address}?download=1")["Content-Disposition"].startswith("attachment")
    etag = viewer.client.get(address)["ETag"]
    assert viewer.client.get(address, headers={"if-none-match": etag}).status_code == 304
    # Of another run it is not there.
    assert viewer.client.get(viewer.address(f"runs/{pair[0].run.pk}/media/{image.pk}")).status_code == 404


def test_text_differences() -> None:
    assert marked("same text", "same text").remark == "The same text."
    shown = marked("a b c d", "a x c d e")
    assert [piece.text.strip() for piece in shown.pieces if piece.differs] == ["x", "e"]
    assert "".join(piece.text for piece in shown.pieces) == "a x c d e"
    assert marked("one", "two").remark == "Differs from the first word on."
    # Texts that matching would take long for are told apart at their first difference.
    long = marked("z " + "a b " * MAX_WORDS, "y " + "b a " * MAX_WORDS)
    assert [piece.differs for piece in long.pieces] == [False, True] or long.pieces[-1].differs
    # Words that repeat without end are no trap.
    assert marked("w " * 900, "v " + "w " * 900).remark

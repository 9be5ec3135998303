"""The steps and tensors that each place of the server names for a fault of a run, as people read them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from csv import reader
from html import unescape
from typing import Any, Final

from dashboard.helpers.token_clients import client_with_token
from dashboard.helpers.visitors import Visitor, get_json, html, run_html

from fp8scope_dashboard.alerts.channels import wording
from fp8scope_dashboard.alerts.delivery.message import compose
from fp8scope_dashboard.alerts.models import Alert, Delivery
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.text.numbers import THIN

NUMBER: Final = r"\d+(?:,\d{3})*"
SINCE: Final = r"(?:since|began at|first \S+ at) (?:about )?step "
# What a place names: its name, the step in words, and the tensor; None if it names none.
Named = tuple[str, str, str | None]


def text_of(page: str) -> str:
    """The text of HTML, with plain spaces, and commas in numbers. Names of tensors are whole."""
    text = unescape(re.sub(r"<wbr>|</?span[^>]*>", "", page))
    text = re.sub(rf"(?<=\d){THIN}(?=\d)", ",", re.sub(r"<[^>]+>", " ", text))
    return " ".join(text.split())


def said(text: str, pattern: str) -> str:
    """The step in words that follows a pattern; the text itself if there is none."""
    match = re.search(pattern + rf"({NUMBER}(?:–{NUMBER}| or before)?)", text)
    return match[1] if match else f"nothing in: {text}"


def of_alert(visitor: Visitor, event: Alert) -> Iterator[Named]:
    """The places that show one alert: pages, figures, the API and the message to a channel."""
    run = event.run
    tensor = event.evidence["first"]["name"] if event.evidence.get("first") else None
    yield "alert", said(text_of(html(visitor, f"alerts/{event.pk}/")), r"Began at step "), tensor
    listed = text_of(html(visitor, f"alerts/?run={run.pk}&state=all&kind={event.kind}"))
    yield "list of alerts", said(listed, r"Onset at step "), tensor
    drawn = get_json(visitor, f"alerts/{event.pk}/evidence.json")["figure"]["layout"]
    marks = [mark["text"] for mark in drawn["annotations"] if mark["text"].startswith("onset")]
    yield "chart of the alert", said(marks[0], "onset "), tensor
    yield (
        "message of the alert",
        said(event.message, SINCE),
        _first_in(event.message),
    )
    delivery = Delivery.objects.filter(event=event).select_related("event__run__project").first()
    assert delivery is not None
    lines = "\n".join(wording.details(compose(delivery).notices[0]))
    yield "message to a channel", said(lines, r"Onset at step "), tensor


def _first_in(message: str) -> str | None:
    """The tensor with which a message begins, or that it calls the first."""
    match = re.search(r"first (\S+\.\w+) at step|^(blocks\S+)", message)
    return (match[1] or match[2]) if match else None


def of_run(visitor: Visitor, run: Run, kind: str, title: str) -> Iterator[Named]:
    """The places of a run that name its alert of a kind, by its title."""
    if Alert.objects.filter(run=run, kind=kind, state="open").exists():
        yield "card", said(text_of(run_html(visitor, run)), rf"{re.escape(title)} ?since step "), None
    loss = get_json(visitor, f"runs/{run.pk}/figures/loss.json")
    yield "mark in the loss", said(_texts(loss["figure"]), rf"{re.escape(title)} from step "), None
    (event,) = [
        event
        for event in client_with_token(visitor.project).get(f"/api/v1/runs/{run.pk}").json()["events"]
        if event["kind"] == kind
    ]
    words = said(event["message"], SINCE)
    # The API has the last of these steps as a number.
    assert re.split("–", words)[-1].replace(",", "") == str(event["onset_step"])
    yield "API", words, _first_in(event["message"])


def _texts(value: Any) -> str:
    """All strings of a figure."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        value = list(value.values())
    return "\n".join(_texts(each) for each in value) if isinstance(value, list) else ""


def of_strip(visitor: Visitor, run: Run) -> Iterator[Named]:
    """The entries of the strip that are no change of the run, with the tensor that they name."""
    page = run_html(visitor, run)
    for entry in re.findall(r'<li class="onset onset--(?:danger|warning)".*?</li>', page, re.DOTALL):
        text = text_of(entry)
        named = re.search(r"blocks\S+?\.(?:input|weight|grad_output)", text)
        title = re.sub(r"^.*?step [\d,–]+ ?", "", text)[:40]
        yield f"strip: {title}", said(text, r"steps around ?step "), named[0] if named else None


def of_diagnosis(visitor: Visitor, run: Run) -> Iterator[Named]:
    """The steps of the diagnosis that name a tensor: on its page, and in the API."""
    answer = client_with_token(visitor.project).get(f"/api/v1/runs/{run.pk}/diagnosis").json()
    page = text_of(html(visitor, f"runs/{run.pk}/diagnosis/"))
    for finding in answer["findings"]:
        if finding["onset"] is None or not finding["tensors"]:
            continue
        first, last = finding["earliest"], finding["onset"]
        words = f"{last:,}" if first in (None, last) else f"{first:,}–{last:,}"
        yield f"API, {finding['step']}", words, finding["tensors"][0]
        yield f"sentence, {finding['step']}", said(finding["sentence"], r"(?:since|from) step "), None
        assert f"Steps around {words}" in page, "the page of the diagnosis"


def of_ranking(visitor: Visitor, run: Run, statistic: str) -> Iterator[Named]:
    """The first row of the ranking of tensors, if it has an onset."""
    shown = run_html(visitor, run, f"tensors/ranking?statistic={statistic}")
    row = re.findall(r"<tr>(.*?)</tr>", shown.partition("<tbody>")[2], re.DOTALL)[0]
    if "none" not in text_of(row):
        yield "ranking", said(text_of(row), r"step "), re.findall(r'data-name="([^"]+)"', row)[0]


def first_column(visitor: Visitor, run: Run, statistic: str, tensor: str, limit: float) -> tuple[int, int]:
    """The steps of the first column of the map in which a tensor is over a limit, or has changed by it."""
    mode = "value" if statistic.endswith("_rate") else "change"
    query = f"statistic={statistic}&mode={mode}&filter={tensor}&fold=role&open=all"
    answer = visitor.client.get(visitor.address(f"runs/{run.pk}/tensors/map.csv?{query}"))
    head, *rows = reader(answer.content.decode().splitlines())
    # With a filter for one tensor, each group has its values.
    over = [
        label
        for label, value in zip(head[1:], rows[-1][1:], strict=True)
        if value and abs(float(value)) > limit
    ]
    spans = [[int(step) for step in label.split("-")] for label in over]
    return next((span[0], span[-1]) for span in spans if span[-1] > 10)

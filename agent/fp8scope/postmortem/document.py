"""The post-mortem of a run: what is known of it, and how it is written as Markdown and as HTML."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from fp8scope.postmortem.figure import DocumentFigure

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#1f2430;"
    "background:#fff}table{border-collapse:collapse;margin:.5rem 0}td,th{border:1px solid #d9dde5;"
    "padding:.25rem .6rem;text-align:left;vertical-align:top;overflow-wrap:anywhere}"
    "svg{width:100%;height:auto}h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:1.8rem}"
)


@dataclass(frozen=True)
class DocumentEvent:
    """Something that happened at a step, or at a time that has none."""

    step: int | None
    text: str


@dataclass(frozen=True, kw_only=True)
class PostMortem:
    """The content of a report. Empty parts are left out, and `gaps` says what is not known and why."""

    title: str
    facts: Sequence[tuple[str, str]]
    signs: Sequence[DocumentEvent] = ()
    """Changes, in the order of the steps."""
    alerts: Sequence[DocumentEvent] = ()
    commands: Sequence[DocumentEvent] = ()
    """Commands and their results, and other changes to the run."""
    cause: Sequence[str] = ()
    replay: Sequence[str] = ()
    products: Sequence[tuple[str, str, str]] = ()
    """Layer, product, and its gradient error."""
    figures: Sequence[DocumentFigure] = ()
    gaps: Sequence[str] = field(default_factory=tuple)

    def _lists(self) -> list[tuple[str, list[str]]]:
        """The sections that are lists of sentences, in their order."""
        sections = [
            ("Onset, in order", [_at(event) for event in self.signs]),
            ("Alerts", [_at(event) for event in self.alerts]),
            ("Commands and changes", [_at(event) for event in self.commands]),
            ("Suspected cause", list(self.cause)),
            ("Replay", list(self.replay)),
            ("Not known", list(self.gaps)),
        ]
        return [(title, lines) for title, lines in sections if lines]

    def markdown(self, figures_at: str = "") -> str:
        """The report as Markdown. `figures_at`: the beginning of the names of the figures' files."""
        lines = [f"# {_plain(self.title)}", "", "| | |", "|---|---|"]
        lines += [f"| {_plain(name)} | {_plain(value)} |" for name, value in self.facts]
        for title, sentences in self._lists():
            lines += ["", f"## {title}", "", *(f"* {_plain(sentence)}" for sentence in sentences)]
            if title == "Replay" and self.products:
                lines += ["", "| layer | product | gradient error |", "|---|---|---|"]
                lines += [f"| {_plain(a)} | {_plain(b)} | {_plain(c)} |" for a, b, c in self.products]
        if self.figures:
            lines += ["", "## Figures"]
        for figure in self.figures:
            lines += ["", f"![{_plain(figure.title)}]({figures_at}{figure.name}.svg)"]
        return "\n".join([*lines, ""])

    def html(self) -> str:
        """The report as a standalone page."""
        parts = [
            "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
            "<meta name='viewport' content='width=device-width,initial-scale=1'>",
            f"<title>{escape(self.title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(self.title)}</h1>",
            _table([], self.facts),
        ]
        for title, sentences in self._lists():
            items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
            parts.append(f"<h2>{escape(title)}</h2><ul>{items}</ul>")
            if title == "Replay" and self.products:
                parts.append(_table(["layer", "product", "gradient error"], self.products))
        if self.figures:
            parts += ["<h2>Figures</h2>", *(f"<figure>{figure.svg()}</figure>" for figure in self.figures)]
        return "".join([*parts, "</body></html>\n"])


def _at(event: DocumentEvent) -> str:
    return event.text if event.step is None else f"step {event.step}: {event.text}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{'<tr>' + cells + '</tr>' if head else ''}{body}</table>"


def _plain(text: str) -> str:
    """A line of Markdown that shows this text: what has a meaning in Markdown or HTML is escaped."""
    return re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", " ".join(text.split()))

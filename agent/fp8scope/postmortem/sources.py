"""The sources of a post-mortem: the folder of an incident, or the dashboard's API."""

import json
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import urllib3

from fp8scope.config import Settings
from fp8scope.delivery.transport import MAX_ANSWER_BYTES, classify
from fp8scope.incidents.folder import StoredIncident
from fp8scope.postmortem.document import DocumentEvent, PostMortem
from fp8scope.postmortem.figure import DocumentFigure
from fp8scope.postmortem.onset import series_of, signs
from fp8scope.recording.records import Row

CHARTED = 6
"""Charts of a report, the loss first."""
PRODUCTS = 10
POINTS = 2000


class SourceError(RuntimeError):
    """The server does not answer, or refuses; the message says why."""


def from_incident(incident: StoredIncident) -> PostMortem:
    """The post-mortem of an incident, from its folder alone."""
    document, rows = incident.document, incident.rows
    tensors, statistics = document["tensors"], document["statistics"]
    moved = signs(rows, tensors, statistics)
    alert = document.get("alert")
    result = incident.result()
    first, last = document["steps"]
    facts = [
        ("Run", f"{document['name']} ({document['run']})"),
        ("Page", document.get("page") or "none"),
        ("Kept", f"steps {first} to {last}, rank {document['rank']} on {document['host']}"),
        ("Because of", _why(document)),
        ("When", document["created_at"]),
        ("Precision", str(document["precision"])),
        ("Recipe", json.dumps(document["recipe"]) if document["recipe"] else "none"),
        ("Step in question", str(document["target"])),
    ]
    charted = ["loss", *(sign.name for sign in moved if sign.name != "loss")][:CHARTED]
    return PostMortem(
        title=f"Post-mortem: {document['name']}, step {document['target']}",
        facts=facts,
        signs=[DocumentEvent(sign.step, sign.sentence()) for sign in moved],
        alerts=[_alert(alert)] if alert else [],
        commands=[_change(event) for event in document["events"] if event.get("name") != "incident"],
        replay=[] if result is None else result["sentences"],
        products=[] if result is None else _products(result.get("bisection")),
        figures=_charts(rows, tensors, statistics, charted, document["target"]),
        gaps=_gaps(moved, result, incident),
    )


def _why(document: Mapping[str, Any]) -> str:
    if document["alert"]:
        return f"the alert {_alert(document['alert']).text}"
    last = str(document["failure"]).strip().splitlines()
    return f"the failure {last[-1]}" if last else "a failure"


def _gaps(moved: Sequence[object], result: object, incident: StoredIncident) -> list[str]:
    gaps = []
    if not moved:
        gaps.append("No value left its earlier range within the kept steps.")
    if result is None:
        gaps.append(f"The step was not replayed: fp8scope replay {incident.folder} SCRIPT")
    gaps.append("The diagnosis is on the dashboard: fp8scope report with the run's id includes it.")
    return gaps


def _charts(
    rows: Sequence[Row], tensors: Sequence[str], statistics: Sequence[str], names: Sequence[str], mark: int
) -> list[DocumentFigure]:
    steps = [row.step for row in rows]
    series = dict(series_of(rows, tensors, statistics))
    return [
        DocumentFigure(f"{number}", name, steps, series[name].tolist(), mark)
        for number, name in enumerate(names, 1)
        if name in series and len(steps) > 1
    ]


def _alert(alert: Mapping[str, Any]) -> DocumentEvent:
    step = alert.get("onset_step")
    name = alert.get("rule") or str(alert.get("kind", "")).replace("_", " ").capitalize()
    return DocumentEvent(
        alert.get("step") if step is None else step,
        f"{name} ({alert.get('severity', '')}). {alert.get('message', '')}",
    )


def _change(event: Mapping[str, Any]) -> DocumentEvent:
    """A report of the run: the result of a command, or a change."""
    if event.get("kind") == "command":
        message = f": {event['message']}" if event.get("message") else ""
        return DocumentEvent(event.get("step"), f"command {event['command']} {event['state']}{message}")
    why = f" ({event['why']})" if event.get("why") else ""
    return DocumentEvent(event.get("step"), f"{event.get('text', '')}{why}")


def _products(bisection: Mapping[str, Any] | None) -> list[tuple[str, str, str]]:
    rows = [] if bisection is None else bisection["products"][:PRODUCTS]
    return [(row["layer"], row["product"], f"{float(row['relative_error']):.2%}") for row in rows]


class RunSource:
    """Reads one run from the dashboard's API."""

    def __init__(self, settings: Settings, run: str) -> None:
        self._pool = urllib3.PoolManager(
            retries=False, timeout=urllib3.Timeout(settings.connect_timeout, read=settings.read_timeout)
        )
        self._headers = {"Authorization": f"Bearer {settings.token}"}
        self._address = f"{settings.url}/api/v1/runs/{run}"

    def postmortem(self) -> PostMortem:
        """The post-mortem of the run. Raises SourceError if the server does not answer."""
        run, diagnosis = self._get(""), self._get("/diagnosis")
        history = self._get("/history", missing={"reports": [], "commands": []})
        alerts = sorted(run["events"], key=lambda alert: alert.get("onset_step") or 0)
        mark = alerts[0].get("onset_step") if alerts else None
        return PostMortem(
            title=f"Post-mortem: {run['name']}",
            facts=[
                ("Run", f"{run['name']} ({run['id']})"),
                ("Page", run["url"]),
                ("State", _state(run)),
                ("Precision", run["precision"]),
                ("Recipe", json.dumps(run["recipe"]) if run["recipe"] else "none"),
                ("Baseline", run["baseline"] or "none"),
            ],
            signs=[
                DocumentEvent(finding["onset"], finding["sentence"])
                for finding in sorted(diagnosis["findings"], key=lambda finding: finding["onset"] or 0)
                if finding["onset"] is not None
            ],
            alerts=[_alert(alert) for alert in alerts],
            commands=_commands(history),
            cause=[text for text in (diagnosis["sentence"], diagnosis["suggestion"]) if text],
            products=_products(_latest(history, "bisect")),
            figures=[chart for name in ("loss", "grad_norm") if (chart := self._chart(name, mark))],
            gaps=_unknown(run, diagnosis),
        )

    def scalar(self, name: str) -> list[float]:
        """Up to POINTS values of a scalar in the order of their steps, NaN where it has none.

        Empty for an unknown name. Raises SourceError if the server does not answer.
        """
        return self._series(name)[1]

    def _series(self, name: str) -> tuple[list[int], list[float]]:
        query = urllib.parse.urlencode({"scalar": name, "points": POINTS})
        series = self._get(f"/series?{query}", missing={"steps": [], "values": []})
        return series["steps"], [
            float("nan") if value is None else float(value) for value in series["values"]
        ]

    def _chart(self, name: str, mark: int | None) -> DocumentFigure | None:
        steps, values = self._series(name)
        if len(values) < 2:
            return None
        return DocumentFigure(name, name, steps, values, mark)

    def _get(self, path: str, missing: Mapping[str, Any] | None = None) -> Any:
        """Return the answer of the server, or `missing` where it has none of this kind."""
        try:
            response = self._pool.request(
                "GET", self._address + path, headers=self._headers, preload_content=False
            )
            body = response.read(MAX_ANSWER_BYTES)
            response.release_conn()
        except urllib3.exceptions.HTTPError as error:
            raise SourceError(f"{self._address}: {type(error).__name__}; try again.") from None
        if response.status in (404, 409, 422) and missing is not None:
            return missing
        outcome = classify(response.status, response.headers, body)
        if response.status != 200 or not outcome.answer:
            raise SourceError(outcome.message or f"HTTP {response.status}")
        return outcome.answer


def _state(run: Mapping[str, Any]) -> str:
    steps = "no step was stored" if run["last_step"] is None else f"last step {run['last_step']}"
    # Servers before this field was added do not send it.
    error = str(run.get("failure", "")).strip().splitlines()
    return f"{run['state']}, {steps}{f': {error[-1]}' if error else ''}"


def _unknown(run: Mapping[str, Any], diagnosis: Mapping[str, Any]) -> list[str]:
    gaps = [] if run["events"] else ["No alert was opened."]
    if run["last_step"] is None:
        return [*gaps, "Without a stored step there is nothing to diagnose."]
    if not diagnosis["sentence"]:
        gaps.append("The run is not diagnosed yet: report again later.")
    elif not diagnosis["current"]:
        gaps.append("The diagnosis is older than the data: report again later.")
    return gaps


def _commands(history: Mapping[str, Any]) -> list[DocumentEvent]:
    """Commands with their results, and changes to the run, by step."""
    events = [
        DocumentEvent(
            command["step"],
            f"{command['given_by']} gave the command {command['kind']}"
            + (f" ({command['reason']})" if command["reason"] else "")
            + f": {command['state']}"
            + (f", {command['message']}" if command["message"] else ""),
        )
        for command in history["commands"]
    ]
    events += [
        _change({"step": report["step"], **report["document"]})
        for report in history["reports"]
        if report["kind"] == "annotation"
    ]
    return sorted(events, key=lambda event: (event.step is None, event.step))


def _latest(history: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    return next((report["document"] for report in history["reports"] if report["kind"] == kind), None)

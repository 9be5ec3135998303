"""Tools about alerts."""

from datetime import datetime
from typing import Any, Final, Literal

from pydantic import Field

from fp8scope.client import Client, RunAlert
from fp8scope.mcp_server.answers import AnswerPart, Link, ToolAnswer
from fp8scope.mcp_server.run_data import Number, RunDocument, RunName, RunText, ServerText, bounded
from fp8scope.mcp_server.tool import Arguments, McpTool

MAX_ALERTS: Final = 50
MAX_TENSORS: Final = 50
MAX_ROWS: Final = 200


class AlertsAsked(Arguments):
    run: str = Field("", max_length=512, description="The id or exact name of a run; empty for the project.")
    state: Literal["open", "acknowledged", "muted", "resolved", "all"] = "open"
    severity: Literal["", "critical", "warning"] = ""
    kind: str = Field("", max_length=64, description="A kind of rule, such as divergence; empty for all.")
    limit: int = Field(20, ge=1, le=MAX_ALERTS)
    after: int | None = Field(None, ge=0, description="`next` of the page before.")


class AlertPart(AnswerPart):
    """An alert. The condition began between the steps `earliest_step` and `onset_step`."""

    id: int
    run_id: str
    run: RunName
    kind: str
    title: RunName
    severity: str
    state: str
    step: int = Field(description="The step at which it was detected.")
    onset_step: int
    earliest_step: int
    value: Number
    threshold: Number
    message: ServerText
    tensors: list[RunName]
    opened_at: datetime
    resolved_at: datetime | None
    acknowledged_at: datetime | None
    acknowledged_by: RunName
    url: str


class AlertsAnswer(ToolAnswer):
    """A page of alerts, newest first. `next` is null on the last page."""

    total: int
    next: int | None
    alerts: list[AlertPart]

    def sentence(self) -> str:
        critical = sum(alert.severity == "critical" for alert in self.alerts)
        return f"{len(self.alerts)} of {self.total:,} alerts, {critical} critical."


def list_alerts(client: Client, asked: AlertsAsked) -> AlertsAnswer:
    """Alerts of the project or of one run, newest first, in pages: what was seen, since which step, and
    whether it is still open."""
    page = client.alert_page(
        run=asked.run or None,
        state=asked.state,
        severity=asked.severity,
        kind=asked.kind,
        limit=asked.limit,
        after=asked.after,
    )
    base = f"{client.url}/p/{client.project()['slug']}"
    return AlertsAnswer(
        total=page.total,
        next=page.next,
        alerts=[_alert(alert) for alert in page.alerts],
        links=[Link(title="Alerts", url=f"{base}/alerts/?state={asked.state}")],
    )


def _alert(alert: RunAlert) -> AlertPart:
    return AlertPart.model_validate({**vars(alert), "tensors": list(alert.tensors[:MAX_TENSORS])})


class OneAlert(Arguments):
    alert: int = Field(ge=0, le=2**62, description="The id of an alert.")


class AlertHistoryPart(AnswerPart):
    kind: str
    at: datetime
    by: RunName
    text: RunText


class EvidenceColumn(AnswerPart):
    """A column of the chart of the evidence."""

    name: RunName
    unit: RunName
    values: list[Number | RunName]


class AlertAnswer(ToolAnswer):
    """An alert with its evidence and the data of its chart."""

    alert: AlertPart
    evidence: RunDocument = Field(description="What the detector saw; the names depend on the kind.")
    history: list[AlertHistoryPart]
    chart: list[EvidenceColumn] = Field(description="The data of its chart, thinned to some rows around it.")
    chart_thinned: bool
    chart_summary: ServerText

    def sentence(self) -> str:
        alert = self.alert
        return (
            f"{alert.severity.capitalize()} alert of the kind {alert.kind}, {alert.state}: began by step "
            f"{alert.onset_step:,}, detected at step {alert.step:,}."
        )


def get_alert(client: Client, asked: OneAlert) -> AlertAnswer:
    """One alert with its evidence: what the detector saw, the data of its chart, and what people did."""
    details = client.alert(asked.alert)
    evidence, is_cut = bounded(details.evidence)
    table = client.alert_table(asked.alert)
    columns, thinned = _thinned(table.get("columns", []))
    return AlertAnswer.model_validate(
        {
            "alert": _alert(details.alert),
            "evidence": evidence,
            "history": list(details.history),
            "chart": columns,
            "chart_thinned": thinned,
            "chart_summary": table.get("summary") or table.get("empty") or "",
            "links": [Link(title="The alert and its evidence", url=details.alert.url)],
            "left_out": ["evidence: the page has all of it."] if is_cut else [],
        }
    )


def _thinned(columns: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """The columns with at most MAX_ROWS rows, every n-th and the last."""
    rows = max((len(column["values"]) for column in columns), default=0)
    if rows <= MAX_ROWS:
        return columns, False
    stride = -(-rows // (MAX_ROWS - 1))
    chosen = sorted({*range(0, rows, stride), rows - 1})
    return [{**column, "values": [column["values"][row] for row in chosen]} for column in columns], True


TOOLS: Final = (
    McpTool(call=list_alerts, title="List alerts"),
    McpTool(call=get_alert, title="An alert and its evidence"),
)

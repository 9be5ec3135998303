"""No cell of a CSV export is a formula in a spreadsheet program, and the import restores every value."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import uuid
from pathlib import Path

import pytest
from contract.helpers.wire_client import WireClient
from dashboard.helpers.round_trip import everything, moved, settings_of
from django.utils import timezone
from helpers.live_servers import Server
from hypothesis import given
from hypothesis import strategies as st

from fp8scope.cli.archive import QUOTE, Archive
from fp8scope.cli.export import download
from fp8scope_dashboard.alerts.models import Alert
from fp8scope_dashboard.exports.spreadsheet import json_text, safe_header
from fp8scope_dashboard.runs.models import Run

EVIL = '=HYPERLINK("http://outside.invalid","x")'
NAMES = [
    EVIL,
    f"a,{EVIL}",
    f"a;{EVIL}",
    f"a\t{EVIL}",
    f"a\r\n{EVIL}",
    "a,+1",
    "a;-1",
    "a,@SUM(1)",
    "a;\t=1",
    "'=1",
]
TENSORS = [f"blocks.{index}.{name}" for index, name in enumerate(NAMES)]
FORMULA = re.compile(r"[=+\-@\t\r]")
NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?([eE][-+]?\d+)?|inf|nan)", re.IGNORECASE)


def formulas(text: str) -> list[str]:
    """Cells that a program would read as formulas, if it splits at commas, semicolons or tabs."""
    cells = [
        cell
        for separator in ",;\t"
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        for cell in row
    ]
    return [cell for cell in cells if FORMULA.match(cell) and not NUMBER.fullmatch(cell)]


@pytest.fixture
def client(server: Server) -> WireClient:
    """A run with formulas as names and with negative numbers."""
    sender = WireClient(server.url, server.token)
    config = {name: name for name in NAMES}
    sender.register(
        name=f"run,{EVIL}", config=config, tags=[f"t;{EVIL}"[:64]], group=f"g,{EVIL}", baseline=f"b;{EVIL}"
    )
    assert sender.catalogue(TENSORS).status == 200
    values = [[-1.5 * (row + 1)] * len(TENSORS) for row in range(3)]
    body = sender.batch(0, [1, 2, 3], scalars={"loss": [-2.5, math.nan, -math.inf]}, tensors={"amax": values})
    assert sender.send(body).status == 201
    scores = {"writer": str(sender.writer), "seq": 1, "step": 3, "name": f"e,{EVIL}", "metric": f"m;{EVIL}"}
    scores |= {"kind": "mean", "items": [-1.0, -2.0], "item_ids": [f"i;{EVIL}", f"j,{EVIL}"]}
    assert sender.request("POST", "/evaluations", json=scores).status == 201
    Alert.objects.create(
        run_id=sender.run, kind="loss_spike", severity="warning", onset_step=1, step=2, value=-3.0,
        message=f"Loss;{EVIL}", opened_at=timezone.now(), evidence={"tensors": [{"name": TENSORS[2]}]},
    )  # fmt: skip
    return sender


def exported(server: Server, run: uuid.UUID, path: Path) -> str:
    download(settings_of(server), run, "csv", path)
    return path.read_bytes().decode()


def test_it_works(server: Server, client: WireClient, tmp_path: Path) -> None:
    text = exported(server, client.run, tmp_path / "run.csv")
    assert formulas(text) == []
    assert "-2.5" in text and "-inf" in text and "-1.5" in text, "numbers are unchanged"
    assert text.count("HYPERLINK") > 20


def test_the_import_restores_the_names(server: Server, client: WireClient, tmp_path: Path) -> None:
    before = everything(client.run)
    new = moved(server, client.run, "csv", tmp_path / "run")
    assert everything(new) == before
    run, old = Run.objects.get(pk=new), Run.objects.get(pk=client.run)
    assert (run.name, run.config, run.tags) == (old.name, old.config, old.tags)
    assert Archive(tmp_path / "run").description["run"]["name"] == f"run,{EVIL}"
    assert [event.message for event in Alert.objects.filter(run_id=new)] == [f"Loss;{EVIL}"]


@pytest.mark.parametrize(
    "name", ['x"; filename="evil.exe', "a\r\nSet-Cookie: b=c", "../../etc/passwd", "=1", "…"]
)
def test_the_file_name_is_safe(server: Server, name: str) -> None:
    sender = WireClient(server.url, server.token)
    sender.register(name="x")
    Run.objects.filter(pk=sender.run).update(name=name)
    for form in ("csv", "parquet"):
        answer = sender.request("GET", f"/export?format={form}")
        header = answer.headers["Content-Disposition"]
        assert re.fullmatch(rf'attachment; filename="[\w-]+\.{form}"', header, re.ASCII), header
        assert "Set-Cookie" not in answer.headers


TEXT = st.text(st.sampled_from("=+-@'\t\r\n,;ab\"\\ ") | st.characters(codec="utf-8"), max_size=30)


@given(TEXT)
def test_a_column_name_is_safe_and_can_be_restored(name: str) -> None:
    safe = safe_header(name)
    assert QUOTE.sub("", safe) == name
    assert not any(FORMULA.match(part) for part in re.split(r"[,;\t\r\n]", safe) if part != "")


@given(
    st.recursive(
        TEXT | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner)
    )
)
def test_json_is_safe_and_unchanged(document: object) -> None:
    text = json_text({"document": document})
    assert json.loads(text) == {"document": document}
    assert formulas(f"#fp8scope {text}") == []
    assert formulas("0,1,5,,," + '"' + text.replace('"', '""') + '"') == []

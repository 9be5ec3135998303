"""The error table of docs/wire.md, row by row: what the agent does with each answer."""

import json
import random
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from agent.helpers.faulty_http import Fault
from agent.helpers.models import tiny_model, train_step
from agent.helpers.wire_messages import read_batch
from agent.helpers.wire_server import WireServer

from fp8scope.config import Settings
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run


def record(run: Run, first: int, last: int) -> None:
    for number in range(first, last + 1):
        with run.step(number=number) as step:
            step.log(loss=float(number))


def test_it_works(server: WireServer, settings: Settings) -> None:
    run = Run(settings, blank_registration("fine"))
    record(run, 1, 10)
    report = run.finish()
    assert report.complete and report.messages_refused == 0 and report.directory is None


@pytest.mark.parametrize(
    ("status", "code"), [(400, "malformed"), (400, "protocol_mismatch"), (400, "not_arrow"), (422, "invalid")]
)
def test_a_refused_message_is_set_aside_and_the_rest_goes_on(
    status: int, code: str, server: WireServer, settings: Settings
) -> None:
    server.times(1, Fault(status=status, code=code), "/batches")
    run = Run(replace(settings, batch_rows=5), blank_registration("refused"))
    record(run, 1, 20)
    report = run.finish()
    assert report.complete and report.messages_refused == 1 and report.directory is not None
    stored = set(server.run.steps)
    (body,) = report.directory.glob("refused/*.arrow")
    kept = read_batch(body.read_bytes(), "application/vnd.apache.arrow.stream")
    missing = {row["step"] for row in kept["rows"]}
    # Every step is either stored or kept, none both, and the run's page shows the difference.
    assert missing and stored | missing == set(range(1, 21)) and not stored & missing
    assert server.run.finish["rows_sent"] == 20
    (why,) = report.directory.glob("refused/*.why.json")
    assert json.loads(why.read_bytes())["code"] == code


def test_an_unknown_run_is_registered_with_its_catalogue(server: WireServer, settings: Settings) -> None:
    server.times(1, Fault(status=404, code="unknown_run"), "/batches")
    run = Run(settings, blank_registration("unknown"))
    record(run, 1, 10)
    assert run.finish().complete
    assert server.run.steps == list(range(1, 11))
    assert [method for method, _ in server.requests].count("PUT") == 2


def test_two_processes_with_one_writer_id_end_with_both_stored_once(
    server: WireServer, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, writer = str(uuid.uuid4()), uuid.uuid4()
    runs = []
    for side in ("left", "right"):
        with monkeypatch.context() as patch:
            ids = iter([uuid.UUID(run_id), writer])
            patch.setattr(uuid, "uuid4", lambda ids=ids: next(ids))
            runs.append(
                Run(replace(settings, directory=tmp_path / side, batch_rows=3), blank_registration(side))
            )
    left, right = runs
    for number in range(1, 61):
        for run, offset in ((left, 0), (right, 1000)):
            with run.step(number=number + offset) as step:
                step.log(loss=float(number))
    reports = [left.finish(), right.finish()]
    assert [report.complete for report in reports] == [True, True]
    assert sorted(server.run.steps) == [*range(1, 61), *range(1001, 1061)]
    assert sum(report.points_sent for report in reports) == server.run.points == 240
    assert len({w for w, _ in server.run.receipts}) == 2


def test_a_catalogue_gap_sends_the_catalogue_from_its_beginning(
    server: WireServer, settings: Settings
) -> None:
    server.times(1, Fault(status=409, code="catalogue_gap"), "/batches")
    run = Run(settings, blank_registration("gap"))
    model = tiny_model()
    run.watch(model)
    for _ in range(3):
        with run.step():
            train_step(model)
    assert run.finish().complete
    posts = [path for _, path in server.requests if path.endswith("/tensors")]
    # The tensors (a slow start tells before them who writes), and after the gap all of it from the beginning.
    assert len(posts) in (2, 3) and len(server.run.rows) == 3


def test_a_batch_that_is_too_large_is_halved_until_it_fits(server: WireServer, settings: Settings) -> None:
    server.stop()
    server.max_body = 8_000
    run = Run(settings, blank_registration("large"))
    # 32 KB that cannot be compressed.
    values = random.Random(0)
    for number in range(1, 201):
        with run.step(number=number) as step:
            step.log({f"scalar{index}": values.random() for index in range(20)})
    server.start()
    report = run.finish()
    assert report.complete and report.messages_refused == 0
    assert server.run.steps == list(range(1, 201)) and server.run.points == report.points_sent
    assert len(server.run.receipts) > 3


def test_one_row_that_is_too_large_is_set_aside(server: WireServer, settings: Settings) -> None:
    server.plan = lambda method, path: Fault(status=413, code="too_large") if "/batches" in path else None
    run = Run(settings, blank_registration("giant"))
    record(run, 1, 3)
    report = run.finish()
    assert report.complete and report.messages_refused == 3 and server.run.rows == []


def test_a_run_of_another_project_is_kept(server: WireServer, settings: Settings) -> None:
    server.plan = lambda method, path: Fault(status=409, code="run_conflict") if method == "PUT" else None
    run = Run(settings, blank_registration("theirs"))
    record(run, 1, 3)
    report = run.finish(timeout=60)
    assert not report.complete and report.directory is not None and server.runs == {}


def test_an_evaluation_that_is_refused_does_not_stop_the_rows(server: WireServer, settings: Settings) -> None:
    server.times(1, Fault(status=422, code="invalid"), "/evaluations")
    run = Run(settings, blank_registration("evaluation"))
    record(run, 1, 3)
    run.log_eval("heldout", "accuracy", [1, 0])
    record(run, 4, 6)
    report = run.finish()
    assert report.complete and report.messages_refused == 1 and report.directory is not None
    assert server.run.steps == [1, 2, 3, 4, 5, 6] and server.run.evaluations == []
    (kept,) = [p for p in report.directory.glob("refused/*.json") if "why" not in p.name]
    assert json.loads(kept.read_bytes())["items"] == [1.0, 0.0]

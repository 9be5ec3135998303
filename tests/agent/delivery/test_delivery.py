"""Whatever the network and the server do, every point is stored exactly once."""

from dataclasses import replace

import pytest
from agent.helpers.faulty_http import Fault
from agent.helpers.wire_server import WireServer
from helpers.waiting import wait_until

from fp8scope.config import Settings
from fp8scope.delivery.resend import send_spool
from fp8scope.recording.finish_report import FinishReport
from fp8scope.recording.registration import blank_registration
from fp8scope.run import Run

FAULTS = {
    "500": Fault(status=500),
    "502 of a proxy": Fault(status=502),
    "503": Fault(status=503, code="unavailable", headers=(("Retry-After", "0"),)),
    "429": Fault(status=429, code="slow_down", headers=(("Retry-After", "0.02"),)),
    "429 without Retry-After": Fault(status=429, code="slow_down"),
    "hang": Fault(hang=True),
    "drop before": Fault(drop=True),
    "drop after": Fault(drop=True, after=True),
    "twice": Fault(twice=True),
    "a page": Fault(page=True),
    "401": Fault(status=401, code="bad_token"),
    "403 of a proxy": Fault(status=403),
    "400 of a proxy": Fault(status=400),
    "redirect": Fault(status=302, headers=(("Location", "http://127.0.0.1:1/"),)),
}
PLACES = ["/batches", "/finish", "/evaluations", "/tensors", "/"]


def record(run: Run, steps: int) -> None:
    """`steps` steps with one or two values each, and an evaluation in the middle."""
    for index in range(steps):
        with run.step() as step:
            step.log(loss=1.0 / (index + 1))
            if index % 3 == 0:
                step.log(grad_norm=float("nan"))
        if index == steps // 2:
            run.log_eval("heldout", "accuracy", [1, 0])


def assert_stored_once(server: WireServer, report: FinishReport, steps: int) -> None:
    stored = server.run
    assert report.complete, report
    assert stored.steps == list(range(1, steps + 1))
    assert (report.rows_sent, report.points_sent) == (steps, stored.points)
    assert stored.points == 2 * steps + -(-steps // 3)
    assert len(stored.evaluations) == 1
    assert (stored.finish["rows_sent"], stored.finish["points_sent"]) == (steps, stored.points)
    sequence = sorted(seq for _, seq in stored.receipts)
    assert sequence == list(range(len(sequence)))


def test_it_works(server: WireServer, settings: Settings) -> None:
    run = Run(settings, blank_registration("plain"))
    record(run, 50)
    assert_stored_once(server, run.finish(), 50)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_loses_and_doubles_nothing(
    name: str, place: str, server: WireServer, settings: Settings
) -> None:
    server.times(4, FAULTS[name], place)
    run = Run(replace(settings, read_timeout=0.1), blank_registration(name))
    record(run, 30)
    report = run.finish(timeout=20)
    if report.directory is not None:
        # What only a person can repair does not hold up the program's end. After that, sync sends the rest.
        assert FAULTS[name].status in (400, 401, 403, 302)
        server.plan = lambda method, path: None
        rest = send_spool(report.directory, settings, 10.0)
        assert rest.problem == "" and not report.directory.exists()
        finish = server.run.finish
        report = FinishReport(complete=True, rows_sent=finish["rows_sent"], points_sent=finish["points_sent"])
    assert_stored_once(server, report, 30)


@pytest.mark.parametrize("echo", [True, False])
def test_answers_that_come_twice_acknowledge_once(echo: bool, server: WireServer, settings: Settings) -> None:
    server.echo_seq = echo
    server.plan = lambda method, path: Fault(twice=True)
    run = Run(replace(settings, batch_rows=2), blank_registration("echo"))
    record(run, 40)
    assert_stored_once(server, run.finish(), 40)


def test_a_server_that_is_down_for_the_middle_of_a_run(server: WireServer, settings: Settings) -> None:
    run = Run(settings, blank_registration("outage"))
    for index in range(90):
        if index == 30:
            server.stop()
        if index == 60:
            server.start()
        with run.step() as step:
            step.log(loss=float(index))
    report = run.finish()
    assert report.complete and server.run.steps == list(range(1, 91))
    assert report.points_sent == server.run.points == 180


def test_a_server_that_was_never_there(server: WireServer, settings: Settings) -> None:
    server.stop()
    run = Run(settings, blank_registration("early"))
    record(run, 20)
    server.start()
    assert_stored_once(server, run.finish(), 20)


def test_finish_is_bounded_and_tells_what_is_left(
    server: WireServer, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    server.plan = lambda method, path: Fault(hang=True)
    run = Run(replace(settings, read_timeout=30), blank_registration("hanging"))
    record(run, 5)
    report = run.finish(timeout=0.3)
    assert not report.complete and report.directory == run.directory
    assert report.directory.is_dir()
    assert f"fp8scope sync {run.directory}" in caplog.text
    server.released.set()


def test_a_wrong_token_is_told_once_and_does_not_hold_up_the_end(
    server: WireServer, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(replace(settings, token="fp8s_wrong", hold_seconds=0.02), blank_registration("stranger"))
    record(run, 10)
    report = run.finish(timeout=60)
    assert not report.complete and report.directory is not None
    assert server.runs == {}
    assert sum("Training continues" in message for message in caplog.messages) == 1
    assert "fp8s_wrong" not in caplog.text


def test_rows_wait_for_each_other_and_a_backlog_goes_in_few_messages(
    server: WireServer, settings: Settings
) -> None:
    server.stop()
    run = Run(replace(settings, batch_rows=100), blank_registration("backlog"))
    for index in range(1000):
        with run.step() as step:
            step.log(loss=float(index))
    server.start()
    report = run.finish()
    assert report.complete and server.run.steps == list(range(1, 1001))
    assert len(server.run.receipts) <= 13


def test_a_heartbeat_says_that_an_idle_run_lives(server: WireServer, settings: Settings) -> None:
    run = Run(settings, blank_registration("idle"))
    with run.step() as step:
        step.log(loss=object())
    wait_until(lambda: server.runs and server.run.heartbeats, "a heartbeat")
    beat = server.run.heartbeats[0]
    assert beat["writer"] == run.session.writers.pipeline.writer and beat["dropped"] == 0
    run.finish()
    assert server.run.finish["errors"] == 1
    assert server.run.scalars("loss") == [None]

"""`fp8scope tail DIR` against a real server: what is stored is what TensorBoard's own reader says."""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent.helpers.event_files import scalars, session_start, tensor, tensorboard_says, write
from agent.helpers.import_files import PNG
from helpers.live_servers import Server

from fp8scope.cli.main import main
from fp8scope.cli.server import server_settings
from fp8scope.delivery.transport import NextAction, SendOutcome, Transport
from fp8scope.event_files.follower import DirectoryFollower, FollowOptions
from fp8scope_dashboard.media import contents
from fp8scope_dashboard.media.models import MediaItem
from fp8scope_dashboard.runs.models import Run, Writer
from fp8scope_dashboard.runs.services import attempts_of
from fp8scope_dashboard.telemetry import compaction, queries
from fp8scope_dashboard.telemetry.models import Block, Chunk

WRITER = Path(__file__).parent / "helpers" / "event_writing.py"
FILE = "events.out.tfevents.{}.host"
NEVER = ["--ended-after", "1e9"]


@pytest.fixture(autouse=True)
def login(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)


def line(run: Run, name: str) -> list[tuple[int, float]]:
    series = queries.scalar(run.pk, name)
    return list(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def once(directory: Path, *more: str) -> int:
    return main(["tail", str(directory), "--once", *more])


def test_it_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log directory with two runs, written and closed long ago."""
    for name in ("a", "deep/b"):
        write(
            tmp_path / name / FILE.format(1),
            [scalars(step, loss=3 - step / 50, val__acc=step / 50) for step in range(50)],
        )
    assert once(tmp_path, "--precision", "fp8", "--ended-after", "0") == 0
    assert capsys.readouterr().out == "200 values of 2 runs sent.\n"
    runs = {run.name: run for run in Run.objects.all()}
    assert set(runs) == {"a", "deep/b"}
    for name, run in runs.items():
        said = tensorboard_says(tmp_path / name)
        assert {tag: line(run, tag) for tag in said} == said
        assert (run.state, run.precision, run.last_step) == ("finished", "fp8", 49)
        assert (run.rows_sent, run.points_sent) == (run.rows_stored, run.points_stored) == (50, 100)
        assert run.finished_at is not None and run.created_at < run.finished_at


def test_images_and_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is stored once, also by a second call after the file has grown."""

    def logged(step: int) -> list[Any]:
        picture = np.array([b"1", b"1", PNG, b"<svg/>"], object)
        sample = tensor(step, "sample", f"at\n{step}", plugin="text")
        return [scalars(step, loss=1.0), sample, tensor(step, "picture", picture, plugin="images")]

    path = write(tmp_path / "r" / FILE.format(1), logged(1) + logged(2))
    assert once(tmp_path, *NEVER) == 0
    out = capsys.readouterr()
    assert out.out == "2 values of 1 run sent, and 4 images or texts.\n"
    assert "has images or texts that are left out: they are no PNG" in out.err
    write(path, logged(3), append=True)
    assert once(tmp_path, *NEVER) == 0 and once(tmp_path, *NEVER) == 0
    items = MediaItem.objects.order_by("step", "name").select_related("content")
    assert [(item.name, item.step) for item in items] == [
        (name, step) for step in (1, 2, 3) for name in ("picture", "sample")
    ]
    assert contents.read(items[0].content) == PNG and contents.read(items[5].content) == b"at\n3"
    run = Run.objects.get()
    assert (run.state, run.rows_stored) == ("running", 3) and [
        start["attempt"] for start in attempts_of(run)
    ] == [0]


def follow(directory: Path, tmp_path: Path, number: int) -> subprocess.Popen[bytes]:
    with (tmp_path / f"tail{number}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "fp8scope", "tail", str(directory), "--every", "0.1", *NEVER],
            stdout=log,
            stderr=log,
        )


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def stored() -> int:
    return sum(Run.objects.values_list("points_stored", flat=True))


def test_killed_at_any_moment_it_neither_loses_nor_doubles_a_value(tmp_path: Path) -> None:
    """Two trainings write with two libraries, while five tails in turn are killed."""
    logs, chance, kinds = tmp_path / "logs", random.Random(3), ("tensorboardX", "torch")
    logs.mkdir()
    trainings = [
        subprocess.Popen([sys.executable, str(WRITER), str(logs / kind), "3000", kind]) for kind in kinds
    ]
    try:
        for number in range(5):
            tail, before = follow(logs, tmp_path, number), stored()
            until(lambda: stored() > before or all(training.poll() is not None for training in trainings))  # noqa: B023
            time.sleep(chance.random() / 2)
            tail.send_signal(signal.SIGKILL)
            tail.wait()
        assert [training.wait(120) for training in trainings] == [0, 0]
    finally:
        for training in trainings:
            training.kill()
    assert once(logs, *NEVER) == 0
    for kind in kinds:
        run, said = Run.objects.get(name=kind), tensorboard_says(logs / kind)
        # tensorboardX writes underscores.
        said = {tag.replace(" ", "_"): values for tag, values in said.items()}
        assert len(said.pop("lm_loss_vs_samples")) == 3000
        assert line(run, "lm_loss") == said.pop("lm_loss") == line(run, "loss")
        assert line(run, "learning-rate") == said["learning-rate"] == line(run, "learning_rate")
        assert line(run, "eval/accuracy") == said["eval/accuracy"] and len(said) == 2
        # Not only equal because the last value of a step counts: nothing was stored twice.
        assert run.points_stored == 3000 * 4 + 300
        assert Writer.objects.filter(run=run).count() == 1 and run.state == "running"


def test_a_second_tail_of_the_same_directory_doubles_nothing(tmp_path: Path) -> None:
    write(tmp_path / FILE.format(1), [scalars(step, loss=1.0, lr=2.0) for step in range(20_000)])
    tails = [follow(tmp_path, tmp_path, number) for number in range(3)]
    try:
        until(lambda: Run.objects.filter(points_stored__gte=60_000).exists())
        write(tmp_path / FILE.format(1), [scalars(20_000, loss=4.0)], append=True)
        until(lambda: Run.objects.get().last_step == 20_000)
        time.sleep(0.5)
    finally:
        for tail in tails:
            tail.kill()
            tail.wait()
    run = Run.objects.get()
    assert run.points_stored == 60_001 and len(line(run, "loss")) == 20_001


def test_what_the_server_has_stays_where_it_is_compacted(tmp_path: Path) -> None:
    path = write(tmp_path / "r" / FILE.format(1), [scalars(step, loss=1.0, a=step) for step in range(3_000)])
    assert once(tmp_path, *NEVER) == 0
    run = Run.objects.get()
    Run.objects.update(state="finished")
    while compaction.compact_run(run.pk):
        pass
    assert Block.objects.filter(run=run).exists() and not Chunk.objects.filter(run=run).exists()
    Run.objects.update(state="running")
    write(path, [scalars(3_000, loss=2.0, a=7.0)], append=True)
    assert once(tmp_path, *NEVER) == 0
    assert Run.objects.get().points_stored == 6_002 and line(run, "a")[-1] == (3_000, 7.0)


def test_a_training_that_resumes_is_a_new_attempt(tmp_path: Path) -> None:
    """A process that begins at an older checkpoint writes another file, as Megatron's does."""
    write(tmp_path / FILE.format(1), [scalars(step, lr=1.0, loss=3.0) for step in range(100)])
    assert once(tmp_path, *NEVER) == 0
    write(tmp_path / FILE.format(2), [scalars(step, lr=2.0, loss=4.0) for step in range(80, 90)])
    assert once(tmp_path, *NEVER) == 0
    run = Run.objects.get()
    assert line(run, "loss") == [(step, 4.0 if step >= 80 else 3.0) for step in range(90)]
    assert line(run, "lr") == [(step, 2.0 if step >= 80 else 1.0) for step in range(90)]
    attempts = [(a["attempt"], a["first_step"], a["last_step"]) for a in attempts_of(run)]
    assert attempts == [(0, 0, 99), (1, 80, 89)]


def test_a_session_that_begins_purges_as_in_tensorboard(tmp_path: Path) -> None:
    """`SummaryWriter(purge_step=50)`, whose first value comes later."""
    events = [scalars(step, loss=3.0, other=1.0) for step in range(100)]
    write(tmp_path / FILE.format(1), events)
    write(tmp_path / FILE.format(2), [session_start(50), *(scalars(s, loss=4.0) for s in range(55, 60))])
    assert once(tmp_path, *NEVER) == 0
    run, said = Run.objects.get(), tensorboard_says(tmp_path)
    assert {tag: line(run, tag) for tag in said} == said
    assert said["other"][-1] == (49, 1.0) and said["loss"][50] == (55, 4.0)


def test_values_of_another_axis_neither_hide_others_nor_begin_anew(tmp_path: Path) -> None:
    """Epochs among batches, as Keras writes them, and an evaluation that comes late."""
    events = []
    for step in range(300):
        events.append(scalars(step, batch_loss=1.0))
        if step % 100 == 99:
            events += [scalars(step // 100, epoch_loss=2.0), scalars(step - 60, val=1.0, val2=2.0)]
    write(tmp_path / FILE.format(1), events)
    assert once(tmp_path, *NEVER) == 0
    run, said = Run.objects.get(), tensorboard_says(tmp_path)
    assert {tag: line(run, tag) for tag in said} == said
    assert len(attempts_of(run)) == 1 and Writer.objects.filter(run=run, imported=True).count() == 1


def test_a_run_that_had_ended_and_goes_on_is_running_again(tmp_path: Path) -> None:
    path = write(tmp_path / "r" / FILE.format(1), [scalars(step, loss=1.0) for step in range(10)])
    for steps in (10, 20, 30):
        assert once(tmp_path, "--ended-after", "0") == 0
        run = Run.objects.get()
        assert (run.state, run.last_step, len(line(run, "loss"))) == ("finished", steps - 1, steps)
        assert (run.rows_sent, run.points_sent) == (run.rows_stored, run.points_stored)
        write(path, [scalars(step, loss=1.0) for step in range(steps, steps + 10)], append=True)
        assert once(tmp_path, *NEVER) == 0
        assert Run.objects.get().state == "running"


class LosingTransport:
    """The real transport, of whose answers two of four are lost after the server has stored the message."""

    def __init__(self, server: Server) -> None:
        self._real = Transport(server_settings(server.url, None))
        self._calls = 0

    def send(
        self, method: str, path: str, body: bytes, content_type: str = "application/json"
    ) -> SendOutcome:
        self._calls += 1
        outcome = self._real.send(method, path, body, content_type)
        is_lost = self._calls % 4 > 1
        return SendOutcome(action=NextAction.RETRY, message="away", wait=0.1) if is_lost else outcome


def test_while_answers_are_lost_it_waits_says_so_and_doubles_nothing(tmp_path: Path, server: Server) -> None:
    said: list[str] = []
    write(tmp_path / "r" / FILE.format(1), [scalars(step, loss=1.0) for step in range(9_000)])
    DirectoryFollower(tmp_path, LosingTransport(server), FollowOptions(patience=0.0), say=said.append).turn()
    run = Run.objects.get()
    assert run.points_stored == 9_000 and len(line(run, "loss")) == 9_000
    assert any("away; waiting" in message for message in said) and "the server is back" in said


def test_what_cannot_be_sent_is_said(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert once(tmp_path) == 1 and "has no event files" in capsys.readouterr().err
    path = write(tmp_path / "r" / FILE.format(1), [scalars(1, loss=1.0), scalars(-3, loss=2.0)])
    with path.open("ab") as file:
        file.write(b"\x30" + b"\0" * 40)
    assert once(tmp_path, *NEVER) == 0
    said = capsys.readouterr().err
    assert "is damaged at byte" in said and "negative steps" in said
    monkeypatch.setenv("FP8SCOPE_TOKEN", "fp8s_wrong")
    assert once(tmp_path) == 1 and "token" in capsys.readouterr().err
    run = Run.objects.get()
    assert line(run, "loss") == [(1, 1.0)]


def test_runs_have_the_configuration_that_was_logged(tmp_path: Path) -> None:
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "run"))
    writer.add_text("hidden_size", "4096")
    writer.add_text("fp8", "hybrid")
    writer.add_scalar("loss", math.nan, 1)
    writer.add_text("sample", "not a setting", 1)
    writer.close()
    assert once(tmp_path, "--name", "night", *NEVER) == 0
    run = Run.objects.get(name="night/run")
    assert run.config == {"hidden_size": 4096, "fp8": "hybrid"} and math.isnan(line(run, "loss")[0][1])
    assert run.environment["client"] == "tensorboard"


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "r" / FILE.format(1), [scalars(1, loss=1.0)])
    assert once(tmp_path, "--json", *NEVER) == 0
    lines = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [entry["type"] for entry in lines] == ["message", "end"]
    assert lines[1] == {"type": "end", "runs": 1, "refused": 0, "values": 1}

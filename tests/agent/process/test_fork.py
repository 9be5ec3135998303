"""fork, DataLoader workers, copies and pickles: a run belongs to the process that began it."""

import copy
import multiprocessing
import os
import pickle
from pathlib import Path

import pytest
import torch
from agent.helpers.models import tiny_model, train_step
from agent.helpers.wire_server import WireServer
from agent.helpers.writer import join_sender
from torch.utils.data import DataLoader, Dataset

from fp8scope.config import Settings
from fp8scope.delivery.resend import send_spool
from fp8scope.recording.registration import blank_registration
from fp8scope.recording.spool import find_spools
from fp8scope.run import Run


def record(run: Run, first: int, last: int) -> None:
    for number in range(first, last + 1):
        with run.step(number=number) as step:
            step.log(loss=float(number))


def in_child(work: object) -> int:
    """Run `work()` in a forked child that exits as a program does not: at once. Returns the exit status."""
    assert callable(work)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_it_works(server: WireServer, settings: Settings) -> None:
    run = Run(settings, blank_registration("parent"))
    record(run, 1, 10)

    def child() -> None:
        record(run, 101, 110)
        assert run.finish(timeout=10).complete

    assert in_child(child) == 0
    record(run, 11, 20)
    report = run.finish()
    assert report.complete
    assert sorted(server.run.steps) == [*range(1, 21), *range(101, 111)]
    # Two writers of one run; the child's end is not the run's.
    assert len({row["writer"] for row in server.run.rows}) == 2
    assert [end["ends_run"] for end in server.run.finishes] == [False, True] and report.rows_sent == 20
    assert server.run.finish["rows_sent"] == 20
    assert list(find_spools(settings.directory)) == []


def test_a_child_without_steps_leaves_no_files(server: WireServer, settings: Settings) -> None:
    run = Run(settings, blank_registration("parent"))
    record(run, 1, 3)
    assert in_child(lambda: None) == 0
    assert in_child(lambda: run.finish(timeout=10)) == 0
    record(run, 4, 5)
    assert run.finish().complete
    assert server.run.steps == [1, 2, 3, 4, 5]
    assert list(find_spools(settings.directory)) == []


def test_syncs_the_records_of_a_crashed_child(server: WireServer, settings: Settings) -> None:
    run = Run(settings, blank_registration("parent"))
    record(run, 1, 3)
    server.stop()
    assert in_child(lambda: record(run, 101, 150)) == 0
    server.start()
    assert run.finish().complete
    (left,) = find_spools(settings.directory)
    send_spool(left, settings, 10.0)
    stored = sorted(server.run.steps)
    assert stored[:3] == [1, 2, 3] and set(range(101, 150)) <= set(stored) <= set(range(1, 151))
    assert len(stored) == len(set(stored))


def test_a_living_child_does_not_hold_the_parents_lock(server: WireServer, settings: Settings) -> None:
    server.stop()
    run = Run(settings, blank_registration("parent"))
    record(run, 1, 3)
    ready, go = multiprocessing.Pipe()
    child = os.fork()
    if child == 0:
        go.recv()
        os._exit(0)
    run.finish(timeout=0.2)
    join_sender(run)
    server.start()
    report = send_spool(run.directory, settings, 10.0)
    ready.send("end")
    os.waitpid(child, 0)
    assert report.problem == "" and server.run.steps == [1, 2, 3]


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, run: Run) -> None:
        self.run = run

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers_do_not_disturb_the_run(
    method: str, server: WireServer, settings: Settings
) -> None:
    run = Run(settings, blank_registration("loader"))
    loader = DataLoader(Numbers(run), num_workers=2, multiprocessing_context=method)
    for batch in loader:
        with run.step() as step:
            step.log(value=batch)
    assert run.finish().complete
    assert server.run.scalars("value") == [float(index) for index in range(8)]
    assert list(find_spools(settings.directory)) == []


def test_a_watched_model_can_be_copied_and_pickled(
    server: WireServer, settings: Settings, tmp_path: Path
) -> None:
    model = tiny_model()
    run = Run(settings, blank_registration("copies"))
    run.watch(model)
    model.run = run  # type: ignore[assignment]
    twin = copy.deepcopy(model)
    reloaded = pickle.loads(pickle.dumps(model))
    torch.save(model.state_dict(), tmp_path / "checkpoint.pt")
    assert id(twin.run) == id(run)
    with run.step():
        train_step(model)
        # Copies are other models: what they do is not counted here.
        train_step(twin)
        train_step(reloaded)
    report = run.finish()
    assert report.complete and report.errors == 0
    (row,) = server.run.rows
    names = [tensor["name"] for tensor in next(iter(server.run.catalogues.values()))]
    assert dict(zip(names, row["tensors"]["numel"], strict=True))["0.input"] == 8 * 32
    with reloaded.run.step() as step:
        step.log(loss=1.0)
    assert reloaded.run.finish().complete and len(server.runs) == 1

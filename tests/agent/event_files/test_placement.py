"""The attempts that values belong to, the names that they get, and the directories that are runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from agent.helpers.event_files import scalars, write

from fp8scope.event_files.log_directory import TooManyRunsError, run_id_of, runs_in
from fp8scope.event_files.names import STANDARD, ScalarNames, is_loss
from fp8scope.event_files.placement import AttemptFinder, FileState
from fp8scope.step import MAX_SCALARS, SCALAR_NAME

Values = list[tuple[str, int]]


def places(*files: Values) -> list[list[str]]:
    finder = AttemptFinder()
    return [
        [finder.place(file, tag, step).stream for tag, step in values]
        for file, values in ((FileState(name=f"f{number}"), values) for number, values in enumerate(files))
    ]


def test_it_works() -> None:
    """A process that resumes at step 2 after three steps."""
    first, second = places([("loss", 1), ("loss", 2), ("loss", 3)], [("lr", 2), ("loss", 2), ("loss", 3)])
    assert first == ["f0#0"] * 3
    # The first tag of the new file is new: only the second one tells that the training has gone back.
    assert second == ["f1#0", "f1#1", "f1#1"]
    _, second = places([("lr", 1), ("loss", 1), ("lr", 2)], [("lr", 2), ("loss", 2), ("lr", 3)])
    assert second == ["f1#1"] * 3


def test_a_file_that_goes_on_or_has_other_tags_is_no_new_attempt() -> None:
    assert places([("loss", 1), ("loss", 2)], [("loss", 3), ("loss", 4)])[1] == ["f1#0"] * 2
    assert places([("loss", 1), ("loss", 9)], [("test", 5), ("test", 9)])[1] == ["f1#0"] * 2


def test_a_tag_that_comes_once_in_each_file_begins_nothing() -> None:
    """Lightning writes `hp_metric` at step 0 whenever it begins, also to test."""
    fit = [("hp_metric", 0), ("loss", 1), ("epoch", 1), ("loss", 9), ("epoch", 9)]
    again = [("hp_metric", 0), ("loss", 5), ("epoch", 5)]
    _, test, resumed = places(fit, [("hp_metric", 0), ("test_loss", 10), ("epoch", 10)], again)
    assert test == ["f1#0"] * 3 and resumed == ["f2#0", "f2#1", "f2#1"]


def test_a_return_within_a_file_is_told_by_the_loss() -> None:
    (values,) = places([("a", 1), ("loss", 5), ("a", 0), ("loss", 6), ("loss", 2), ("a", 3)])
    assert values == ["f0#0", "f0#0", "f0#0<0", "f0#0", "f0#1", "f0#1"]
    (values,) = places([("a", 1), ("a", 5), ("b", 2), ("a", 6), ("a", 3)])
    assert values == ["f0#0", "f0#0", "f0#0<0", "f0#0", "f0#1"]


def test_equal_steps_are_no_return() -> None:
    assert places([("loss", 1), ("loss", 1), ("loss", 1)]) == [["f0#0"] * 3]


def test_a_session_begins_only_where_something_is_void() -> None:
    finder, file, other = AttemptFinder(), FileState(name="a"), FileState(name="b")
    finder.start(file, 0)
    assert finder.place(file, "loss", 10).attempt == 0
    finder.start(other, 11)
    assert finder.place(other, "loss", 11).attempt == 0
    finder.start(other, 5)
    place = finder.place(other, "loss", 8)
    assert (place.attempt, place.begins_at, place.stream) == (1, 5, "b#1")


def test_late_values_belong_to_the_attempt_that_has_their_step() -> None:
    finder, first, second = AttemptFinder(), FileState(name="a"), FileState(name="b")
    finder.place(first, "loss", 90)
    finder.place(first, "loss", 100)
    finder.place(second, "loss", 80)
    finder.place(second, "loss", 90)
    late, later = finder.place(second, "epoch", 3), finder.place(second, "val", 85)
    assert (late.attempt, late.is_late, late.stream) == (0, True, "b#1<0")
    assert (later.attempt, later.is_late, later.stream) == (1, True, "b#1<1")


@pytest.mark.parametrize(
    ("tag", "names"),
    [
        ("loss", ("loss",)),
        ("lm loss", ("lm_loss", "loss")),
        ("reduced_train_loss", ("reduced_train_loss", "loss")),
        ("Loss/train", ("Loss/train", "loss")),
        ("learning-rate", ("learning-rate", "learning_rate")),
        ("train/grad_norm", ("train/grad_norm", "grad_norm")),
        ("tokens", ("logged/tokens",)),
        ("val/loss", ("val/loss",)),
        ("lm loss vs samples", ()),
    ],
)
def test_names(tag: str, names: tuple[str, ...]) -> None:
    assert ScalarNames().names_of(tag) == names


def test_of_two_losses_the_first_or_the_one_of_that_name_counts() -> None:
    names = ScalarNames()
    assert names.names_of("train/loss") == ("train/loss", "loss")
    assert names.names_of("lm loss") == ("lm_loss",)
    assert names.names_of("loss") == ("loss",) and names.names_of("train/loss") == ("train/loss",)
    assert is_loss("Train/Loss") and not is_loss("val/loss")


def test_names_are_valid_and_differ() -> None:
    names, tags = ScalarNames(), ["a b", "a_b", "a:b", "x" * 300, "x" * 301, "", "é", "LOSS", "Learning-Rate"]
    own = [names.names_of(tag)[0] for tag in tags]
    assert len(set(own)) == len(tags) and all(SCALAR_NAME.fullmatch(name) for name in own)
    assert not set(own) & STANDARD.keys()


def test_a_run_has_room_for_so_many_names() -> None:
    names = ScalarNames()
    sizes = [len(names.names_of(f"tag{number}")) for number in range(MAX_SCALARS + 5)]
    assert sum(sizes) == MAX_SCALARS - len(STANDARD) and len(names.left_out) == 5 + len(STANDARD)


def test_each_directory_with_event_files_is_a_run(tmp_path: Path) -> None:
    for name in ("", "a", "a/b", "c/d/e"):
        write(tmp_path / name / "events.out.tfevents.1.host", [scalars(1, a=1.0)])
    (tmp_path / "a" / "events.out.tfevents.1.profile-empty").touch()
    (tmp_path / "notes.txt").touch()
    os.symlink(tmp_path, tmp_path / "a" / "loop")
    runs = runs_in(tmp_path)
    assert [run.path for run in runs] == [".", "a", "a/b", "c/d/e"]
    assert all(len(run.files) == 1 for run in runs)


def test_a_run_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a" / "events.out.tfevents.1.host", [])
    (run,) = runs_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    (relative,) = runs_in(Path("."))
    (inner,) = runs_in(tmp_path / "a")
    ids = {
        run_id_of(tmp_path, run, ""),
        run_id_of(Path("."), relative, ""),
        run_id_of(tmp_path / "a", inner, ""),
    }
    assert len(ids) == 1
    write(tmp_path / "a" / "events.out.tfevents.2.host", [])
    assert run_id_of(tmp_path, runs_in(tmp_path)[0], "") in ids
    assert run_id_of(tmp_path, runs_in(tmp_path)[0], "other") not in ids
    path.unlink()
    assert run_id_of(tmp_path, runs_in(tmp_path)[0], "") not in ids


def test_too_many_runs_are_refused(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path / f"{number}" / "events.out.tfevents.1.host", [])
    with pytest.raises(TooManyRunsError, match="follow directories below it"):
        runs_in(tmp_path, max_runs=2)

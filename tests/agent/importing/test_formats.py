"""Each format is recognised by its content, and read to the values that its file has."""

from __future__ import annotations

import math
import re
import sqlite3
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from agent.helpers.import_files import (
    WRITERS,
    write_inspect_log,
)
from agent.helpers.import_score_files import BEGIN, write_flat_lm_eval, write_lm_eval
from agent.helpers.imported import read
from pyarrow import parquet

from fp8scope.importing.model import UnreadableError
from fp8scope.importing.registry import FORMATS, sources_of
from fp8scope.importing.source import ImportSource

STEPS = list(range(20))
LOSS = {step: 3 / (step + 1) for step in STEPS}


@pytest.mark.parametrize("name", WRITERS)
def test_it_works(name: str, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path)
    assert [form.name for _, form in sources_of(path)] == [name]
    runs = read(path)
    assert runs and all(run.tables for run in runs)
    # The same file gives the same runs, or importing it again would store it twice.
    assert [run.run.key for run in read(path)] == [run.run.key for run in runs]
    for run in runs:
        for table in run.tables:
            assert len(table) and (np.diff(table.steps) >= 0).all()
            assert all(len(values) == len(table) for values in table.scalars.values())


def test_every_format_has_a_file_here() -> None:
    assert {form.name for form in FORMATS} - {"tensorboard"} == set(WRITERS)


def test_a_folder_has_the_sources_of_its_files(tmp_path: Path) -> None:
    for name, write in WRITERS.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    # Neither texts nor samples nor details are runs of their own.
    (tmp_path / "notes.txt").write_text("step,loss\n1,2\n")
    (tmp_path / "debug.log").write_text('{"time": 1, "level": "info"}\n')
    assert sorted({form.name for _, form in sources_of(tmp_path)}) == sorted(WRITERS)
    assert len(list(sources_of(tmp_path))) == len(WRITERS)


def test_csv(tmp_path: Path) -> None:
    run = read(WRITERS["csv"](tmp_path))[0]
    assert run.series("loss") == LOSS and run.series("lr") == dict.fromkeys(STEPS[::2], 0.001)
    assert run.tables[0].times is not None and run.tables[0].times[0] == BEGIN * 1e6
    assert run.run.notes == ["Columns without numbers were left out: model."]
    assert run.names == {"loss", "lr"}


def test_csv_in_other_dialects(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(
        '\ufeffGlobal_Step\tmy loss\t"quoted ""x"""\r\n5\t1.5\tnan\r\n\r\n3\t2.5\t-inf\r\nx\t1\t1\r\n7\t1\r\n'
    )
    (run,) = read(path)
    assert run.series("my_loss") == {5: 1.5, 3: 2.5}
    assert run.tables[0].steps.tolist() == [3, 5]
    assert any("2 rows were skipped" in note for note in run.run.notes)
    (run,) = read(path, loss="my loss")
    assert run.series("loss") == {5: 1.5, 3: 2.5}
    (run,) = read(path, step_column="my loss")
    assert run.tables[0].steps.tolist() == [1]
    with pytest.raises(UnreadableError, match="no column 'nothing'; it has"):
        read(path, step_column="nothing")


def test_jsonl(tmp_path: Path) -> None:
    run = read(WRITERS["jsonl"](tmp_path))[0]
    assert run.series("loss") == LOSS and run.series("eval/acc") == {step: step / 20 for step in STEPS}
    path = tmp_path / "b.jsonl"
    path.write_text(
        '{"iteration": 1, "x": NaN}\n[1]\n{"iteration": -1, "x": 2}\n{"iteration": 2, "x": Infinity}\n{"a'
    )
    (run,) = read(path)
    assert math.isnan(run.series("x")[1]) and run.series("x")[2] == math.inf
    assert run.run.notes == ["3 lines were skipped: they are no objects, or have no step."]


def test_the_state_of_a_trainer(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text(
        '{\n"max_steps": 30, "log_history": [{"loss": 2.0, "step": 10}, {"eval_loss": 1.5, "step": 10},'
        '{"loss": 1.0, "step": 20, "epoch": 0.5}]}'
    )
    (run,) = read(path)
    assert run.series("loss") == {10: 2.0, 20: 1.0} and run.series("eval_loss") == {10: 1.5}
    assert run.run.total_steps == 30


def test_parquet(tmp_path: Path) -> None:
    run = read(WRITERS["parquet"](tmp_path))[0]
    assert run.series("loss") == LOSS and run.series("lr") == dict.fromkeys(STEPS[::2], 0.001)
    assert run.run.notes == ["Columns without numbers were left out: model."]


def test_lm_eval(tmp_path: Path) -> None:
    (run,) = read(write_lm_eval(tmp_path))
    assert (run.run.name, run.run.precision, run.run.created_at) == ("gpt", "bf16", BEGIN)
    by_name = {(scores.name, scores.metric): scores for scores in run.evaluations}
    assert set(by_name) == {
        ("gsm", "exact_match,flexible"),
        ("gsm", "exact_match,strict-match"),
        ("toy", "acc"),
    }
    scores = by_name["toy", "acc"]
    assert (scores.step, scores.kind, scores.higher_is_better, len(scores.items)) == (
        200,
        "proportion",
        True,
        60,
    )
    assert scores.item_ids is not None and scores.item_ids[1].startswith("1-0000")
    assert sum(by_name["gsm", "exact_match,flexible"].items) == 30
    # Of groups, and of metrics without scores of items, there is the aggregate. 'N/A' is none.
    assert run.series("all/acc") == {200: 40 / 60} and run.series("toy/word_perplexity") == {200: 12.5}
    assert "gsm/exact_match_stderr_strict-match" not in {name.rsplit("-", 1)[0] for name in run.names}
    assert run.run.notes == ["Of toy were left out: word_perplexity, whose items are no numbers."]
    assert read(tmp_path / "out", step=7)[0].evaluations[0].step == 7


def test_lm_eval_of_two_checkpoints_is_one_run(tmp_path: Path) -> None:
    write_lm_eval(tmp_path, "runs/gpt/checkpoint-200")
    write_lm_eval(tmp_path, "runs/gpt/checkpoint-400")
    write_lm_eval(tmp_path, "runs/other/checkpoint-400")
    runs = read(tmp_path)
    assert [run.evaluations[0].step for run in runs] == [200, 400, 400]
    assert runs[0].run.key == runs[1].run.key != runs[2].run.key


def test_flat_results_of_lm_eval(tmp_path: Path) -> None:
    (run,) = read(write_flat_lm_eval(tmp_path))
    assert run.run.name == "gpt-fp8" and run.run.precision == "fp8" and run.evaluations == []
    assert run.series("hellaswag/acc_norm") == {4000: 0.6}
    assert "There are no samples" in run.run.notes[0]


def test_lighteval(tmp_path: Path) -> None:
    (run,) = read(WRITERS["lighteval"](tmp_path))
    assert (run.run.name, run.run.precision) == ("gpt-bf16", "bf16")
    acc, f1 = run.evaluations
    assert (acc.name, acc.metric, acc.kind, sum(acc.items)) == ("toy|0", "acc", "proportion", 15)
    assert f1.kind == "mean" and f1.item_ids == [str(item) for item in range(30)]
    assert len(run.series(next(name for name in run.names if name.startswith("all/acc")))) == 1


def test_opencompass(tmp_path: Path) -> None:
    first, second = read(WRITERS["opencompass"](tmp_path))
    assert (first.run.precision, second.run.precision) == ("bf16", "fp8")
    assert first.series("ceval/accuracy") == {0: 50.0} and first.series("mmlu/naive_average") == {0: 60.1}
    assert "mmlu/naive_average" not in second.names
    assert sum(first.evaluations[0].items) == 20 and sum(second.evaluations[0].items) == 10
    assert first.evaluations[0].item_ids == second.evaluations[0].item_ids


def test_names_in_a_summary_are_no_paths(tmp_path: Path) -> None:
    path = WRITERS["opencompass"](tmp_path)
    text = path.read_text()
    for name in ("../../etc/passwd", "a\0b", "x" * 5_000):
        path.write_text(text.replace("ceval", name))
        assert read(path, "opencompass")[0].evaluations == []


def test_mlflow_files(tmp_path: Path) -> None:
    (run,) = read(WRITERS["mlflow"](tmp_path))
    assert (run.run.name, run.run.state, run.run.created_at) == ("gpt bf16", "finished", BEGIN)
    assert run.run.config == {"lr": 0.001} and run.run.environment["experiment"] == "exp"
    assert run.series("train/loss") == run.series("loss") == LOSS
    metric = tmp_path / "mlruns" / "1" / run.run.key[12:44] / "metrics" / "odd"
    metric.write_text("1767323045000 1.5\n1767323045000 x 2\n\n1767323045000 2.5 3 name digest\n")
    (run,) = read(tmp_path)
    assert run.series("odd") == {0: 1.5, 3: 2.5} and "2 lines" in run.run.notes[0]
    metric.write_text(f"1767323045000 1.5 {10**30}\n1767323045000 2.5 4\n")
    assert read(tmp_path)[0].series("odd") == {4: 2.5}


def test_mlflow_sqlite(tmp_path: Path) -> None:
    (run,) = read(WRITERS["mlflow-sqlite"](tmp_path))
    values = run.series("loss")
    assert math.isnan(values.pop(5)) and values == {step: value for step, value in LOSS.items() if step != 5}
    assert run.run.config == {"lr": 0.001}


def test_trackio(tmp_path: Path) -> None:
    first, second = read(WRITERS["trackio"](tmp_path))
    assert (first.run.name, second.run.name, first.run.group, first.run.seed) == ("bf16", "fp8", "g", 2)
    assert first.series("loss") == LOSS and first.series("bad")[0] == math.inf
    assert first.run.config == {"lr": 1e-3, "seed": 2} and first.run.created_at == BEGIN


def test_statistics_of_transformer_engine(tmp_path: Path) -> None:
    (run,) = read(write_inspect_log(tmp_path))
    assert run.run.name == tmp_path.name and run.run.precision == "fp8"
    assert run.statistic("amax", "decoder.0.qkv.input") == {step: 2.0 + step for step in range(10)}
    assert set(run.statistic("scale_min", "decoder.0.fc1.grad_output").values()) == {4.0}
    share = (
        run.statistic("underflow", "decoder.0.fc1.weight")[3]
        / run.statistic("numel", "decoder.0.fc1.weight")[3]
    )
    assert share == 0.0125
    assert set(run.series("grad_norm_total").values()) == {1.5}


def test_ranks_of_one_log_are_one_run(tmp_path: Path) -> None:
    write_inspect_log(tmp_path, rank=0)
    write_inspect_log(tmp_path, steps=11, rank=1)
    first, second = read(tmp_path)
    assert first.run.key == second.run.key
    assert (first.tables[0].rank, second.tables[0].rank) == (0, 1)


def test_megatron(tmp_path: Path) -> None:
    (run,) = read(WRITERS["megatron"](tmp_path))
    assert (run.run.precision, run.run.seed, run.run.total_steps) == ("fp8", 1234, 500_000)
    assert run.series("lm_loss")[10] == run.series("loss")[10] == 9.0
    assert run.series("step_seconds")[10] == pytest.approx(1.2)
    assert run.series("tokens")[10] == 2_560 * 4_096
    # The evaluation was before the second start, which went back to step 110.
    assert run.tables[0].scalars["validation/lm_loss_PPL"][-1] == 12.0
    assert [table.attempt for table in run.tables] == [0, 1]
    assert run.tables[1].steps[0] == 110


def test_neptune(tmp_path: Path) -> None:
    path = WRITERS["neptune"](tmp_path)
    (run,) = read(path)
    assert run.series("train/loss") == run.series("loss") == LOSS
    assert repr(run.series("odd")) == repr({step: math.nan if step == 3 else step / 3 for step in STEPS})
    described = run.run
    assert (described.name, described.tags, described.state) == ("gpt gpt-1", ["a"], "finished")
    assert described.config == {"params": {"lr": 1e-3, "layers": 12}} and described.created_at == BEGIN
    assert described.notes == ["Attributes that are no numbers or texts were left out: 1 of file."]
    # Whichever part is named, the run has all; in a folder it is read once.
    later = path.with_name(path.name.replace("_0", "_1"))
    assert read(later)[0].series("train/loss") == LOSS
    assert [source for source, _ in sources_of(tmp_path)] == [path]
    path.unlink()
    with pytest.raises(UnreadableError, match="another part is missing"):
        read(later)


def test_runs_of_neptune_in_a_file_are_told_apart_by_project(tmp_path: Path) -> None:
    path = WRITERS["neptune"](tmp_path)
    part = parquet.read_table(path)
    names = part.schema.names
    other = part.set_column(names.index("project_id"), "project_id", pa.array(["other"] * len(part)))
    halves = [None if step is None else step / 2 for step in part["step"].to_pylist()]
    half = other.set_column(names.index("step"), "step", pa.array(halves, part["step"].type))
    parquet.write_table(pa.concat_tables([part, half]), tmp_path / "both.parquet")
    first, second = read(tmp_path / "both.parquet")
    assert first.run.key != second.run.key
    whole = {step: value for step, value in first.series("train/loss").items() if step % 2 == 0}
    assert second.series("train/loss") == {step // 2: value for step, value in whole.items()}
    assert any("no whole number" in note for note in second.run.notes)


def test_what_no_reader_knows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pkl"
    path.write_bytes(b"\x80\x04\x95\x00cos\nsystem\n")
    for unknown in (path, tmp_path):
        with pytest.raises(
            UnreadableError, match="no format that can be imported: TensorBoard .*, W&B offline runs"
        ):
            list(sources_of(unknown))
    with pytest.raises(UnreadableError, match="does not exist"):
        list(sources_of(tmp_path / "nothing"))
    with pytest.raises(UnreadableError, match="is no offline run of W&B"):
        read(path, "wandb")


def test_a_view_in_a_database_is_not_read(tmp_path: Path) -> None:
    path = WRITERS["trackio"](tmp_path)
    with sqlite3.connect(path) as database:
        database.executescript("""
            ALTER TABLE metrics RENAME TO rows;
            CREATE VIEW metrics AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)
                SELECT i AS id, 'a' AS run_id, 'a' AS run_name, '' AS timestamp, i AS step, '{}' AS metrics
                FROM n;
        """)
    database.close()
    with pytest.raises(UnreadableError, match="no format"):
        read(path)
    with pytest.raises(UnreadableError, match="no metrics"):
        read(path, "trackio")


@pytest.mark.parametrize("named", [True, False])
def test_event_files_name_the_command_that_sends_them(tmp_path: Path, named: bool) -> None:
    """Found by their content in a folder, and as a file."""
    path = tmp_path / "events.out.tfevents.1700000000.host.1.0"
    path.write_bytes(b"\x18" + bytes(40))
    chosen = tmp_path if named else path
    ((source, form),) = sources_of(chosen)
    assert form.name == "tensorboard"
    with pytest.raises(UnreadableError, match=re.escape(f"fp8scope tail {tmp_path} --once")):
        list(form.read(ImportSource(path=source)))

"""Scores of evaluation tools on a real server: items are paired, and FP8 is judged against BF16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agent.helpers.import_files import WRITERS, write_inspect_log
from agent.helpers.import_score_files import MOMENT, write_lm_eval
from helpers.live_servers import Server

from fp8scope.cli.import_command import import_
from fp8scope_dashboard.accounts.models import Scope
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.analysis.models import EvaluationComparison
from fp8scope_dashboard.analysis.services import refresh
from fp8scope_dashboard.evaluations.models import Evaluation
from fp8scope_dashboard.runs.models import Run, Tensor, Writer
from fp8scope_dashboard.telemetry import queries


@pytest.fixture(autouse=True)
def login(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)


def test_it_works(tmp_path: Path) -> None:
    (tmp_path / "bf16").mkdir()
    (tmp_path / "fp8").mkdir()
    write_lm_eval(tmp_path / "bf16", "runs/gpt-bf16/checkpoint-200")
    write_lm_eval(tmp_path / "fp8", "runs/gpt-fp8/checkpoint-200", lambda item: item % 3 > 1)
    for name in ("bf16", "fp8"):
        wishes = ["--precision", name, "--group", name, *(["--baseline", "bf16"] if name == "fp8" else [])]
        assert import_([str(tmp_path / name), *wishes]) == 0
    bf16, fp8 = Run.objects.get(name="gpt-bf16"), Run.objects.get(name="gpt-fp8")
    assert Evaluation.objects.filter(run=fp8).count() == 3
    refresh(fp8.pk)
    judged = EvaluationComparison.objects.get(run=fp8, name="toy", metric="acc")
    # A third of the items is lost, and each is known: a paired difference.
    assert judged.result["difference"] == pytest.approx(-1 / 3)
    assert judged.step == 200 and judged.result["verdict"] in ("worse", "different")
    assert bf16.state == fp8.state == "finished"


def test_importing_scores_again_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lm_eval(tmp_path)
    for out in ("1 rows, 6 values, 3 evaluations", "nothing new"):
        assert import_([str(tmp_path)]) == 0 and out in capsys.readouterr().out
    # The next checkpoint of the same training belongs to the same run.
    write_lm_eval(tmp_path, "runs/gpt/checkpoint-400")
    for outs in (["nothing new", "3 evaluations"], ["nothing new", "nothing new"]):
        assert import_([str(tmp_path)]) == 0
        assert all(out in line for out, line in zip(outs, capsys.readouterr().out.splitlines(), strict=True))
    run = Run.objects.get()
    assert sorted(Evaluation.objects.values_list("step", flat=True)) == [200] * 3 + [400] * 3
    assert queries.scalar(run.pk, "toy/acc").steps.tolist() == [200, 400]
    assert path.name == f"results_{MOMENT}.json"


def test_scores_are_added_to_a_run_that_is_stored(tmp_path: Path, server: Server) -> None:
    (tmp_path / "a.csv").write_text("step,loss\n0,2.5\n200,1.5\n")
    assert import_([str(tmp_path / "a.csv")]) == 0
    run = Run.objects.get()
    results = write_lm_eval(tmp_path)
    for _ in range(2):
        assert import_([str(results), "--run", str(run.pk)]) == 0
    assert Run.objects.get().name == "a" and Evaluation.objects.filter(run=run, step=200).count() == 3
    assert queries.scalar(run.pk, "loss").values.tolist() == [2.5, 1.5]
    assert queries.scalar(run.pk, "all/acc").steps.tolist() == [200]


def test_other_evaluations_have_items_too(tmp_path: Path) -> None:
    for name in ("lighteval", "opencompass"):
        (tmp_path / name).mkdir()
        WRITERS[name](tmp_path / name)
    assert import_([str(tmp_path)]) == 0
    assert set(Run.objects.values_list("name", flat=True)) == {"gpt-bf16", "gpt-bf16_hf", "gpt-fp8_hf"}
    assert Evaluation.objects.filter(run__name="gpt-bf16", name="toy|0").count() == 2
    assert sum(Evaluation.objects.get(run__name="gpt-fp8_hf").items) == 10


def test_statistics_of_tensors(tmp_path: Path) -> None:
    write_inspect_log(tmp_path, rank=0)
    write_inspect_log(tmp_path, rank=1)
    for _ in range(2):
        assert import_([str(tmp_path)]) == 0
    run = Run.objects.get()
    assert Tensor.objects.filter(run=run).count() == 6 and run.rows_stored == run.rows_sent == 40
    assert sorted(Writer.objects.filter(run=run).values_list("rank", flat=True)) == [0, 1]
    index = Tensor.objects.get(run=run, name="decoder.0.fc1.input").index
    line = queries.tensor_series(run.pk, index, "amax")
    assert line.steps.tolist() == list(range(10)) and line.values.tolist() == [
        2.0 + step for step in range(10)
    ]
    heat = queries.heatmap(run.pk, "underflow_rate", columns=10)
    assert heat.values.max() == pytest.approx(0.0125)


def test_a_second_start_is_an_attempt(tmp_path: Path) -> None:
    WRITERS["megatron"](tmp_path)
    for _ in range(2):
        assert import_([str(tmp_path)]) == 0
    run = Run.objects.get()
    assert sorted(Writer.objects.filter(run=run).values_list("attempt", flat=True)) == [0, 1]
    assert queries.scalar(run.pk, "loss").steps.tolist() == list(range(10, 210, 10))
    assert run.state == "finished" and run.rows_sent == run.rows_stored == 31


def test_a_token_that_only_writes_imports_and_continues(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FP8SCOPE_TOKEN", create_token(server.project, "w", scopes=[Scope.WRITE])[1])
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(9)))
    assert import_([str(path)]) == 0
    with path.open("a") as file:
        file.write('{"step": 9, "loss": 0.5}\n')
    # Another token may not read what that one has registered, and says so.
    monkeypatch.setenv("FP8SCOPE_TOKEN", create_token(server.project, "v", scopes=[Scope.WRITE])[1])
    assert import_([str(path)]) == 1
    assert "the token that it was imported with, or one with the scope read" in capsys.readouterr().err
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    assert import_([str(path)]) == 0 and Run.objects.get().rows_stored == 10


def test_what_cannot_be_imported_says_why(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n')
    for arguments, why in (
        ([str(tmp_path / "none")], "does not exist"),
        ([str(path), "--format", "wandb"], "is no offline run of W&B"),
        ([str(path), "--run", "00000000-0000-0000-0000-000000000001"], "has no run"),
        ([str(path), "--step-column", "x"], "has no line with an object and a step"),
    ):
        assert import_(arguments) == 1
        assert why in capsys.readouterr().err
    assert not Run.objects.exclude(rows_stored=0).exists()
    assert import_([str(path), "--dry-run"]) == 0
    assert "JSONL: a: 1 rows, 1 values" in capsys.readouterr().out
    monkeypatch.setenv("FP8SCOPE_TOKEN", "fp8s_wrong")
    assert import_([str(path)]) == 1 and "token" in capsys.readouterr().err

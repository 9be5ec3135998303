"""MLflow's own client against /mlflow of a real server: what it logs is stored, and comes back as it was."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import mlflow.pytorch
import pytest
import torch
from helpers.live_servers import Server
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModelOutput,
    LoggedModelStatus,
    Metric,
    Param,
    RunTag,
    ViewType,
)
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient, fluent

from fp8scope_dashboard.mlflow_tracking.models import MlflowModel
from fp8scope_dashboard.runs.models import Run
from fp8scope_dashboard.telemetry import queries

NOW = 1_790_000_000_000


@pytest.fixture
def tracking(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowClient]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{server.url}/mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", server.token)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    # The experiment that a script of another test has set.
    monkeypatch.setattr(fluent, "_active_experiment_id", None)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "0")
    mlflow.set_tracking_uri(f"{server.url}/mlflow")
    yield MlflowClient()
    while mlflow.active_run() is not None:
        mlflow.end_run()
    mlflow.set_tracking_uri("")
    os.environ.pop("MLFLOW_RUN_ID", None)


def line(run: Run, name: str) -> dict[int, float]:
    series = queries.scalar(run.pk, name)
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def test_it_works(tracking: MlflowClient) -> None:
    """A script that knows MLflow only."""
    mlflow.set_experiment("fp8 ablation")
    tags = {"fp8scope.group": "fp8", "fp8scope.seed": "3"}
    with mlflow.start_run(run_name="delayed scaling", tags=tags) as active:
        mlflow.log_params({"lr": 3e-4, "layers": 12, "fused": True, "name": "gpt"})
        for step in range(12):
            mlflow.log_metrics({"train_loss": 3.0 - 0.01 * step, "val acc": step / 12}, step=step)
        mlflow.log_metric("final", 1.5)
        mlflow.set_tag("team", "nlp")
    run = Run.objects.get(name="delayed scaling")
    assert run.pk.hex == active.info.run_id
    assert (run.state, run.group, run.seed, run.tags) == ("finished", "fp8", 3, ["fp8 ablation"])
    assert run.config == {"lr": 3e-4, "layers": 12, "fused": True, "name": "gpt"}
    expected = {step: 3.0 - 0.01 * step for step in range(12)}
    assert line(run, "train_loss") == expected == line(run, "loss")
    assert line(run, "val_acc") == {step: step / 12 for step in range(12)}
    assert (run.rows_sent, run.points_sent) == (run.rows_stored, run.points_stored)
    stored = tracking.get_run(active.info.run_id)
    assert stored.data.params == {"lr": "0.0003", "layers": "12", "fused": "True", "name": "gpt"}
    assert stored.data.metrics == {"train_loss": expected[11], "val acc": 11 / 12, "final": 1.5}
    assert stored.data.tags["team"] == "nlp" and stored.info.status == "FINISHED"
    history = tracking.get_metric_history(active.info.run_id, "val acc")
    assert [(metric.step, metric.value) for metric in history] == [(step, step / 12) for step in range(12)]


def test_values_that_are_not_finite_and_late_ones(tracking: MlflowClient) -> None:
    run_id = tracking.create_run("0").info.run_id
    metrics = [
        Metric("loss", value, NOW + step, step)
        for step, value in enumerate((2.0, math.nan, math.inf, -math.inf, 1e300, 5e-324))
    ]
    tracking.log_batch(run_id, metrics[3:])
    tracking.log_batch(run_id, metrics[:3])
    tracking.log_metric(run_id, "grad_norm", 7.0, timestamp=NOW, step=1)
    tracking.log_metric(run_id, "loss", 2.5, timestamp=NOW, step=0)
    run = Run.objects.get(pk=run_id)
    values = line(run, "loss")
    assert values.pop(0) == 2.5 and math.isnan(values.pop(1))
    assert values == {2: math.inf, 3: -math.inf, 4: 1e300, 5: 5e-324} and line(run, "grad_norm") == {1: 7.0}
    history = tracking.get_metric_history(run_id, "loss")
    assert [metric.step for metric in history] == [0, *range(6)] and math.isnan(history[2].value)
    assert [metric.value for metric in history[:2]] == [2.0, 2.5]
    assert tracking.get_run(run_id).data.metrics["loss"] == 5e-324
    assert [metric.timestamp for metric in history[1:]] == [NOW, *(NOW + step for step in range(1, 6))]


def test_a_run_that_is_taken_up_again_keeps_its_values(tracking: MlflowClient) -> None:
    """Scripts come back to log a score of the test, without a step."""
    with mlflow.start_run() as active:
        for step in range(5):
            mlflow.log_metric("loss", 2.0 - step / 10, step=step)
    with mlflow.start_run(run_id=active.info.run_id):
        assert Run.objects.get(pk=active.info.run_id).state == "running"
        mlflow.log_metric("test_accuracy", 0.7)
    run = Run.objects.get(pk=active.info.run_id)
    assert run.state == "finished" and len(line(run, "loss")) == 5 and line(run, "test_accuracy") == {0: 0.7}
    assert (run.rows_sent, run.points_sent) == (run.rows_stored, run.points_stored)


def test_an_exception_of_the_script_fails_the_run(tracking: MlflowClient) -> None:
    with pytest.raises(ZeroDivisionError), mlflow.start_run(run_name="broken"):
        mlflow.log_metric("loss", 1 / 0)
    run = Run.objects.get(name="broken")
    assert run.state == "failed" and "FAILED" in run.error


def test_experiments(tracking: MlflowClient) -> None:
    made = tracking.create_experiment("one", tags={"a": "b"})
    assert tracking.get_experiment(made).tags == {"a": "b"}
    found = tracking.get_experiment_by_name("one")
    assert found is not None and found.experiment_id == made
    assert tracking.get_experiment_by_name("two") is None
    with pytest.raises(MlflowException, match="already exists"):
        tracking.create_experiment("one")
    tracking.set_experiment_tag(made, "c", "d")
    tracking.rename_experiment(made, "renamed")
    assert tracking.get_experiment(made).name == "renamed" and tracking.get_experiment(made).tags["c"] == "d"
    tracking.delete_experiment(made)
    assert made not in [experiment.experiment_id for experiment in tracking.search_experiments()]
    (deleted,) = tracking.search_experiments(view_type=ViewType.DELETED_ONLY)
    assert deleted.experiment_id == made
    with pytest.raises(MlflowException, match="is deleted"):
        tracking.create_run(made)
    tracking.restore_experiment(made)
    assert tracking.get_experiment("0").name == "Default"
    with pytest.raises(MlflowException, match="not found"):
        tracking.get_experiment("999999")


def test_experiments_are_searched_by_name_and_tags(tracking: MlflowClient) -> None:
    """As MLflow's own tests of its server expect it."""
    assert [experiment.name for experiment in tracking.search_experiments()] == ["Default"]
    for name, tags in (("a", {"key": "value"}), ("ab", {"key": "vaLue"}), ("Abc", None)):
        tracking.create_experiment(name, tags=tags)

    def found(**options: Any) -> list[str]:
        return [experiment.name for experiment in tracking.search_experiments(**options)]

    assert found(filter_string="attribute.name = 'a'") == ["a"]
    assert found(filter_string="attribute.name != 'a'") == ["Abc", "ab", "Default"]
    assert found(filter_string="name LIKE 'a%'") == ["ab", "a"]
    assert found(filter_string="name ILIKE 'a%' AND tags.key = 'vaLue'") == ["ab"]
    assert found(filter_string="tag.key != 'value'") == ["ab"]
    assert found(filter_string="creation_time < 0") == []
    assert found(order_by=["name DESC"]) == ["ab", "a", "Default", "Abc"]
    first = tracking.search_experiments(max_results=2)
    assert [experiment.name for experiment in first] == ["Abc", "ab"]
    assert found(page_token=first.token) == ["a", "Default"]
    assert found(max_results=4) == ["Abc", "ab", "a", "Default"]


def test_an_experiment_may_name_where_files_go(tracking: MlflowClient, tmp_path: Path) -> None:
    place = tmp_path.as_uri()
    experiment = tracking.create_experiment("files elsewhere", artifact_location=f"{place}/")
    assert tracking.get_experiment(experiment).artifact_location == place
    run = tracking.create_run(experiment)
    tracking.log_text(run.info.run_id, "weights", "model/notes.txt")
    stored = tmp_path / run.info.run_id / "artifacts" / "model" / "notes.txt"
    assert stored.read_text() == "weights"


def test_data_sets_come_back(tracking: MlflowClient) -> None:
    run = tracking.create_run("0")
    read = Dataset("corpus", "f0f3", "local", '{"uri": "a.txt"}', schema="{}", profile='{"num_rows": 2}')
    other = Dataset("corpus", "0ff1", "local", "b.txt")
    for dataset, context in ((read, "train"), (read, "test"), (other, "test")):
        tracking.log_inputs(run.info.run_id, [DatasetInput(dataset, [InputTag("context", context)])])
    inputs = tracking.get_run(run.info.run_id).inputs
    assert inputs is not None
    stored = inputs.dataset_inputs
    contexts = [(entry.dataset.digest, entry.tags[0].value) for entry in stored]
    assert contexts == [("f0f3", "test"), ("0ff1", "test")]
    assert stored[0].dataset == read


def test_any_time_is_taken(tracking: MlflowClient) -> None:
    """Scripts without steps give all values the step 0, and some give numbers such as 789 as times."""
    run_id = tracking.create_run("0").info.run_id
    values = [(2.5, 789), (2.4, 790), (2.4, NOW), (2.3, NOW + 1)]
    for value, timestamp in values:
        tracking.log_metric(run_id, "loss", value, timestamp=timestamp)
    tracking.log_metric(run_id, "loss", 2.4, timestamp=790)
    assert tracking.get_run(run_id).data.metrics == {"loss": 2.3}
    history = tracking.get_metric_history(run_id, "loss")
    assert [(metric.value, metric.timestamp) for metric in history] == values


def test_a_deleted_run_is_not_written(tracking: MlflowClient) -> None:
    run_id = tracking.create_run("0").info.run_id
    tracking.set_tag(run_id, "a", "b")
    tracking.delete_run(run_id)
    message = f"The run {run_id} must be in the 'active' state"
    writes: list[Callable[[], object]] = [
        lambda: tracking.log_metric(run_id, "loss", 1.0),
        lambda: tracking.log_param(run_id, "lr", 1.0),
        lambda: tracking.log_batch(run_id, tags=[RunTag("a", "c")]),
        lambda: tracking.delete_tag(run_id, "a"),
        lambda: tracking.update_run(run_id, name="renamed"),
        lambda: tracking.log_inputs(run_id, [DatasetInput(Dataset("a", "b", "local", "c"))]),
        lambda: tracking.log_outputs(run_id, [LoggedModelOutput("m-1", 0)]),
    ]
    for write in writes:
        with pytest.raises(MlflowException, match=message) as refused:
            write()
        assert refused.value.error_code == "INVALID_PARAMETER_VALUE"
    tracking.restore_run(run_id)
    tracking.log_metric(run_id, "loss", 1.0)
    assert tracking.get_run(run_id).data.tags["a"] == "b"


def test_models_come_back(tracking: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`log_model` of clients of version 3: a model with its values, whose files stay on this machine."""
    monkeypatch.chdir(tmp_path)
    net = torch.nn.Linear(2, 1)
    with mlflow.start_run() as active:
        for step in range(2):
            logged = mlflow.pytorch.log_model(
                net, name="net", step=step, params={"depth": 1}, tags={"kind": "a"},
                serialization_format="pickle", pip_requirements=["torch"],
            )  # fmt: skip
        mlflow.log_metric("accuracy", 0.5, step=3, model_id=logged.model_id)
    outputs = mlflow.get_run(active.info.run_id).outputs
    assert outputs is not None
    assert [(made.model_id == logged.model_id, made.step) for made in outputs.model_outputs] == [
        (False, 0),
        (True, 1),
    ]
    model = tracking.get_logged_model(logged.model_id)
    assert (model.name, model.status, model.params) == ("net", LoggedModelStatus.READY, {"depth": "1"})
    assert model.tags["kind"] == "a" and model.source_run_id == active.info.run_id
    assert model.metrics is not None
    assert [(metric.key, metric.value, metric.step) for metric in model.metrics] == [("accuracy", 0.5, 3)]
    again = mlflow.pytorch.load_model(f"runs:/{active.info.run_id}/net")
    assert torch.equal(again.weight, net.weight)
    newest = tracking.search_logged_models(["0"], "name = 'net' AND status = 'READY'", max_results=1)
    assert [model.model_id for model in newest] == [logged.model_id] and newest.token is not None
    tracking.set_logged_model_tags(logged.model_id, {"a/b": "c"})
    tracking.delete_logged_model_tag(logged.model_id, "a/b")
    tracking.delete_logged_model(logged.model_id)
    with pytest.raises(MlflowException, match="not found"):
        tracking.get_logged_model(logged.model_id)
    run = Run.objects.get(pk=active.info.run_id)
    run.delete()
    assert not MlflowModel.objects.exists()


def test_what_is_not_there_says_what_to_do(tracking: MlflowClient) -> None:
    with pytest.raises(MlflowException, match="leave out registered_model_name") as refused:
        tracking.create_registered_model("gpt")
    assert refused.value.error_code == "ENDPOINT_NOT_FOUND"
    with mlflow.start_run() as active, mlflow.start_span("a trace"):
        mlflow.log_metric("loss", 1.0)
    mlflow.flush_trace_async_logging(terminate=True)
    assert tracking.get_run(active.info.run_id).info.status == "FINISHED"


def test_parameters_and_tags(tracking: MlflowClient) -> None:
    run_id = tracking.create_run("0").info.run_id
    tracking.log_param(run_id, "lr", 0.1)
    tracking.log_param(run_id, "lr", 0.1)
    with pytest.raises(MlflowException, match="Changing param values is not allowed"):
        tracking.log_param(run_id, "lr", 0.2)
    with pytest.raises(MlflowException, match="Changing param values"):
        tracking.log_batch(run_id, [Metric("loss", 1.0, NOW, 1)], [Param("lr", "0.3")], [RunTag("x", "y")])
    run = tracking.get_run(run_id)
    assert run.data.params == {"lr": "0.1"} and run.data.metrics == {} and "x" not in run.data.tags
    tracking.log_batch(run_id, [Metric("loss", 1.0, NOW, 1)], [Param("wd", "0")], [RunTag("x", "y")])
    tracking.set_tag(run_id, "x", "z")
    assert tracking.get_run(run_id).data.tags["x"] == "z"
    tracking.delete_tag(run_id, "x")
    assert "x" not in tracking.get_run(run_id).data.tags
    tracking.set_tag(run_id, "fp8scope.group", "fp8")
    tracking.set_tag(run_id, "fp8scope.baseline", "bf16")
    tracking.set_tag(run_id, "fp8scope.precision", "fp8")
    stored = Run.objects.get(pk=run_id)
    assert (stored.group, stored.baseline, stored.precision) == ("fp8", "bf16", "fp8")
    with pytest.raises(MlflowException, match=r"fp8scope\.precision"):
        tracking.set_tag(run_id, "fp8scope.precision", "int3")
    tracking.update_run(run_id, name="renamed")
    assert Run.objects.get(pk=run_id).name == "renamed" == tracking.get_run(run_id).info.run_name


@pytest.fixture
def three(tracking: MlflowClient) -> list[str]:
    """Runs a, b, c with a loss of 3, 2, 1 and learning rates as texts; c has no loss."""
    ids = []
    for index, name in enumerate("abc"):
        run_id = tracking.create_run("0", run_name=name, start_time=NOW + index).info.run_id
        tracking.log_param(run_id, "lr", f"0.{index}")
        tracking.set_tag(run_id, "kind", "odd" if index % 2 else "even")
        if name != "c":
            tracking.log_metric(run_id, "loss", 3.0 - index, step=index)
        ids.append(run_id)
    tracking.set_terminated(ids[0], "KILLED")
    return ids


SEARCHES = {
    "": "cba",
    "metrics.loss < 2.5": "b",
    "metrics.loss >= 2 AND params.lr = '0.0'": "a",
    "metrics.`loss` != 3": "b",
    "tags.kind = 'even'": "ca",
    'tag.kind LIKE "o%"': "b",
    "attributes.run_name ILIKE 'A'": "a",
    "attributes.status = 'KILLED'": "a",
    "run_name IN ('a', 'c')": "ca",
    "params.missing = 'x'": "",
    "params.missing IS NULL and metrics.loss > 2": "a",
}
NO_SEARCHES = (
    "metrics.loss > 'nothing'",
    "this is no filter",
    "metrics.loss < 2 OR metrics.loss > 1",
    "weights.x = 'y'",
    "attributes.secret = 'y'",
    "params.lr = 0.1",
    "run_name IN 'a'",
)


def test_searches(tracking: MlflowClient, three: list[str]) -> None:
    for condition, names in SEARCHES.items():
        runs = tracking.search_runs(["0"], condition)
        assert "".join(str(run.info.run_name) for run in runs) == names, condition
    for condition in NO_SEARCHES:
        with pytest.raises(MlflowException, match="Invalid"):
            tracking.search_runs(["0"], condition)


def test_search_orders_pages_and_deleted_runs(tracking: MlflowClient, three: list[str]) -> None:
    def names(**options: Any) -> str:
        return "".join(str(run.info.run_name) for run in tracking.search_runs(["0"], **options))

    assert names(order_by=["metrics.loss ASC"]) == "bac" and names(order_by=["metrics.loss DESC"]) == "abc"
    assert names(order_by=["tags.kind DESC", "attributes.start_time ASC"]) == "bac"
    page = tracking.search_runs(["0"], max_results=2)
    assert len(page) == 2 and page.token is not None
    assert len(tracking.search_runs(["0"], max_results=2, page_token=page.token)) == 1
    tracking.delete_run(three[1])
    assert names() == "ca" and names(run_view_type=ViewType.DELETED_ONLY) == "b"
    assert Run.objects.get(pk=three[1]).archived_at is not None
    tracking.restore_run(three[1])
    assert names() == "cba" and names(run_view_type=ViewType.ALL) == "cba"


def test_files_stay_on_the_machine(
    tracking: MlflowClient, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with mlflow.start_run() as active:
        mlflow.log_text("hello", "note.txt")
    (file,) = tmp_path.rglob("note.txt")
    assert file.read_text() == "hello" and active.info.run_id in str(file)


def test_other_tokens_are_refused(
    server: Server, tracking: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = tracking.create_run("0").info.run_id
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "fp8s_" + "x" * 43)
    with pytest.raises(MlflowException, match="401|UNAUTHENTICATED|token"):
        tracking.get_run(run_id)
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN")
    with pytest.raises(MlflowException, match="401|UNAUTHENTICATED|token"):
        tracking.create_run("0")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "anybody")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", server.token)
    assert tracking.get_run(run_id).info.run_id == run_id

"""`fp8scope replay`: the step gives the recorded loss bit for bit, and the broken product is named."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agent.helpers.incidents import incident_of, script, train

from fp8scope.cli.main import main
from fp8scope.incidents.folder import StoredIncident
from fp8scope.recording.records import RecordKind, Row, load_json
from fp8scope.recording.spool import Spool, find_spools


def replay(
    capsys: pytest.CaptureFixture[str], incident: Path, path: str, *options: str, own: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The result of a replay, as JSON."""
    capsys.readouterr()
    status = main(["replay", "--json", *own, str(incident), path, *options])
    out, err = capsys.readouterr()
    assert out, err
    document: dict[str, Any] = json.loads(out.splitlines()[-1])
    repeatable = document["repeatable"] is not False
    assert status == ((0 if document["equal"] else 3) if repeatable else 4)
    return document


@pytest.mark.parametrize("way", ["attach", "step"])
@pytest.mark.parametrize(
    ("fault", "layer", "products"),
    [("grad", "3", ("dgrad", "wgrad")), ("input", "3", ("fprop",)), ("weight", "0", ("fprop",))],
)
def test_three_divergences(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    layer: str,
    products: tuple[str, ...],
    way: str,
) -> None:
    path = script(tmp_path)
    incident = incident_of(path, "--fault", fault, "--way", way)
    # The fault is in the state, so that the replay needs no argument that makes it. The losses after the
    # snapshot before it are not those of the run without it, so the search begins at the next one.
    found = replay(capsys, incident, path, "--way", way)
    assert found["search"] == {"first_step": 31, "last_step": 31}
    assert found["step"] == 31 and "earlier one may be the first. Use --from-start" in found["sentences"][0]
    assert found["equal"] and found["repeatable"] and found["recorded_loss"] == found["replayed_loss"]
    assert found["first_difference"] is None
    assert found["parted"]
    assert found["product"]["layer"] == layer and found["product"]["product"] in products
    assert json.loads((incident / "replay.json").read_text()) == found


@pytest.mark.parametrize("way", ["attach", "step"])
@pytest.mark.parametrize(
    ("fault", "layer"), [pytest.param("grad", "3", id="gradient"), pytest.param("weight", "0", id="weight")]
)
def test_the_first_step_in_which_they_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, layer: str, way: str
) -> None:
    """A fault begins in step 25, by the state of the model; the run fails after step 37."""
    path = script(tmp_path)
    options = ("--fault", fault, "--fault-by", "state", "--way", way)
    incident = incident_of(path, *options)
    assert json.loads((incident / "incident.json").read_text())["target"] == 37
    result = replay(capsys, incident, path, *options)
    assert result["step"] == 25 and result["search"] == {"first_step": 21, "last_step": 25}
    assert result["equal"] and result["repeatable"] and result["parted"]
    assert result["product"]["layer"] == layer
    assert result["sentences"][0] == "FP8 and BF16 diverge first in step 25, of the steps from 21 on."
    assert json.loads((incident / "replay.json").read_text()) == result
    from_start = replay(capsys, incident, path, *options, own=("--from-start",))
    assert from_start["step"] == 25 and from_start["search"] == {"first_step": 1, "last_step": 25}
    assert from_start["product"] == result["product"]
    # Step 37 alone is the one that the incident is about.
    alone = replay(capsys, incident, path, *options, own=("--step", "37"))
    assert alone["step"] == 37 and alone["parted"] and alone["search"] is None


def test_no_step_in_which_they_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a healthy training that fails, the step of the incident is studied."""
    path = script(tmp_path)
    incident = incident_of(path, "--micro", "2")
    result = replay(capsys, incident, path, "--micro", "2")
    assert result["search"] == {"first_step": 21, "last_step": 37}
    assert result["step"] == 37 and result["equal"] and result["repeatable"] and result["parted"] is False
    assert result["sentences"][0] == "FP8 and BF16 diverge in none of the steps 21 to 37."


def test_a_script_that_ends_before_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path)
    incident = incident_of(path)
    result = replay(capsys, incident, path, "--stop", "40")
    assert result["step"] == 37 and result["equal"] and result["parted"] is None
    assert "ended before the search" in result["sentences"][-1] and "--step" in result["sentences"][-1]


def test_from_the_start_it_makes_every_step_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path)
    incident = incident_of(path, "--fault", "weight")
    found = replay(capsys, incident, path, "--fault", "weight", own=("--from-start", "--step", "37"))
    assert found["equal"] and found["product"]["layer"] == "0"
    # A search takes further turns of the loop, and the script counts to the fault only once.
    found = replay(capsys, incident, path, "--fault", "weight", own=("--from-start",))
    assert found["step"] == 25 and found["repeatable"] is False and found["parted"] is None
    assert "ended at step 25" in found["sentences"][0] and "count its own steps" in found["sentences"][-1]
    # Without the fault, the training is another one from step 25 on.
    found = replay(capsys, incident, path, own=("--from-start",))
    assert not found["equal"] and found["first_difference"] == 25 and not found["parted"]
    assert "random state" not in "".join(found["sentences"])
    found = replay(capsys, incident, path, "--seed", "1", own=("--from-start",))
    assert found["first_difference"] == 1 and "seed the script" in found["sentences"][-1]


def test_a_step_that_is_not_repeatable_has_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script does something in this step by its own count, which is another one in the next pass."""
    path = script(tmp_path)
    incident = incident_of(path, "--once", "37")
    found = replay(capsys, incident, path, "--once", "37", own=("--from-start",))
    assert found["equal"] and found["repeatable"] is False
    assert found["recorded_loss"] == pytest.approx(3 * found["repeated_loss"], rel=1e-6)
    assert found["parted"] is None and found["product"] is None and found["bisection"] is None
    said = " ".join(found["sentences"])
    assert "Step 37 is not repeatable" in said and "cannot be compared" in said and "do not part" not in said
    assert main(["replay", "--from-start", str(incident), path, "--once", "37"]) == 4
    assert "is not repeatable" in capsys.readouterr().out
    # From a snapshot the script counts anew: its step is another one, and says so.
    found = replay(capsys, incident, path, "--once", "37")
    assert not found["equal"] and found["repeatable"]


def test_any_kept_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path)
    incident = incident_of(path, "--fault", "grad")
    healthy = replay(capsys, incident, path, own=("--step", "24"))
    assert healthy["equal"] and not healthy["parted"] and healthy["product"] is None
    assert main(["replay", "--step", "99", str(incident), path]) == 2
    assert "step 99 is not among the steps 1 to 37" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--micro", "3"), id="accumulation"),
        pytest.param(("--micro", "2", "--way", "step"), id="accumulation in a block"),
        pytest.param(("--counted-rate",), id="a learning rate from a counter"),
    ],
)
def test_scripts_of_other_kinds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    path = script(tmp_path)
    incident = incident_of(path, "--fault", "grad", *options)
    found = replay(capsys, incident, path, *options)
    assert found["equal"] and found["parted"] and found["product"]["layer"] == "3"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_training_without_fp8(tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str) -> None:
    path = script(tmp_path)
    incident = incident_of(path, "--precision", precision)
    found = replay(capsys, incident, path, "--precision", precision)
    assert found["equal"] and found["parted"] is None
    assert "no layer in FP8" in found["sentences"][-1]


def test_a_resumed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path)
    train(path, "--stop", "15")
    options = ("--checkpoint", "checkpoint.pt", "--fault", "input", "--fault-by", "state")
    incident = incident_of(path, *options)
    assert json.loads((incident / "incident.json").read_text())["steps"] == [16, 52]
    # The two latest snapshots are those after steps 35 and 45.
    for own, step in (((), 36), (("--from-start",), 25), (("--from-start", "--step", "52"), 52)):
        found = replay(capsys, incident, path, *options, own=own)
        assert found["step"] == step and found["equal"] and found["product"]["layer"] == "3"


def test_a_script_that_shows_no_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path)
    incident = incident_of(path, "--plain-loader")
    found = replay(capsys, incident, path, "--plain-loader")
    assert found["equal"] and found["parted"] is None
    assert "run.batches" in found["sentences"][-1]


def test_another_script_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path)
    incident = incident_of(path)
    assert main(["replay", str(incident), path, "--precision", "bf16"]) == 1
    assert "is in only one of them" in capsys.readouterr().err
    assert main(["replay", str(incident), path, "--plain-loader"]) == 1
    assert "run.batches" in capsys.readouterr().err
    assert main(["replay", "--from-start", str(incident), path, "--stop", "5"]) == 1
    assert "the script ended before step 37" in capsys.readouterr().err
    assert main(["replay", str(incident), str(tmp_path / "none.py")]) == 2
    assert main(["replay", str(tmp_path), path]) == 2


def test_a_replay_sends_and_keeps_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path)
    incident = incident_of(path)
    before = sorted((tmp_path / ".fp8scope").rglob("*"))
    replay(capsys, incident, path)
    after = sorted((tmp_path / ".fp8scope").rglob("*"))
    assert [file.name for file in after if file not in before] == ["replay.json"]


def test_goes_on_without_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path)
    options = ("--bad-batch", "35", "--precision", "bf16")
    incident = incident_of(path, *options)
    assert main(["replay", "--skip", "36", str(incident), path, *options, "--stop", "12"]) == 0
    assert "1 batch left out" in capsys.readouterr().err
    (folder,) = [
        spool for spool in find_spools(tmp_path / ".fp8scope/spool") if spool.parent != incident.parent
    ]
    spool, rows, parents, position = Spool(folder), [], set(), 0
    while (record := spool.read(position)) is not None:
        position = record.end
        if record.kind is RecordKind.ROW:
            rows.append(Row.decode(record.payload))
        elif record.kind is RecordKind.REGISTRATION:
            parents.add(load_json(record.payload)["parent"])
    spool.close()
    # It goes on after the snapshot of step 30, with the losses of the run up to the batch that it leaves out.
    kept = {row.step: row.scalars["loss"] for row in StoredIncident(incident).rows}
    assert [row.step for row in rows] == list(range(31, 43))
    assert [row.scalars["loss"] for row in rows[:5]] == [kept[step] for step in range(31, 36)]
    assert kept[36] > 100 > max(row.scalars["loss"] for row in rows)
    assert json.loads((incident / "incident.json").read_text())["run"] in parents


def test_going_on_needs_the_same_data_and_learning_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path)
    incident = incident_of(path, "--counted-rate")
    assert main(["replay", "--skip", "37", str(incident), path, "--counted-rate", "--seed", "1"]) == 1
    assert "batch 31 of the script is another one" in capsys.readouterr().err
    assert main(["replay", "--skip", "37", str(incident), path, "--counted-rate"]) == 1
    # In its second step; in the first one it may have that of the snapshot.
    assert "the script sets the learning rate 0.000714286 after the snapshot" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["replay", "--skip", "a:b", str(incident), path])


FAILS = """
import torch, fp8scope

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
run = fp8scope.attach(model, optimizer, name="fails")
for step in range(5):
    if step == 3:
        raise RuntimeError("the script failed")
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_whose_last_step_ends_with_its_failure_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fails.py"
    path.write_text(FAILS)
    command = [sys.executable, str(path)]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 1
    (incident,) = tmp_path.glob(".fp8scope/spool/*/incident-*")
    found = replay(capsys, incident, str(path))
    assert found["step"] == 3 and found["equal"]

"""The script of docs/incidents.md runs as it stands there, and can be replayed."""

import json
from pathlib import Path

import pytest
from agent.helpers.incidents import train
from helpers.code_blocks import texts_of

from fp8scope.cli.main import main

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "incidents.md"


def test_it_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = texts_of(DOCUMENT)
    path = tmp_path / "documented.py"
    path.write_text(block.replace("run.finish()", "run.session.note_exit('it diverged')\nrun.finish()"))
    train(str(path))
    (incident,) = tmp_path.glob(".fp8scope/spool/*/incident-step-10")
    capsys.readouterr()
    assert main(["replay", "--json", str(incident), str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] and found["parted"] is False and len(found["bisection"]["products"]) == 6

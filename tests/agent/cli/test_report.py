"""`fp8scope report` of an incident, without a server."""

from pathlib import Path

import pytest
from agent.helpers.incidents import incident_of, script

from fp8scope.cli.main import main


def test_the_post_mortem_of_an_incident(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path)
    incident = incident_of(path, "--fault", "weight")
    assert main(["replay", str(incident), path]) == 0
    assert main(["report", str(incident), "-o", "report.md"]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "step 25: 0.weight underflow rate went from 0 to 1" in text.replace("\\", "")
    assert "bit for bit" in text and "| 0 | fprop |" in text
    assert "the failure RuntimeError: the script failed" in text
    for line in text.splitlines():
        if line.startswith("!["):
            assert (tmp_path / line.partition("](")[2].rstrip(")")).is_file()
    assert main(["report", str(incident)]) == 0
    page = (tmp_path / f"postmortem-{incident.name}.html").read_text()
    assert "bit for bit" in page and "<svg" in page


def test_errors_say_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "is not the folder of an incident" in capsys.readouterr().err
    assert main(["report", "nothing"]) == 1
    assert "neither a run's id nor the folder of an incident" in capsys.readouterr().err
    assert main(["report", "1b671a64-40d5-491e-99b0-da01ff1f3341"]) == 1
    assert "fp8scope login" in capsys.readouterr().err

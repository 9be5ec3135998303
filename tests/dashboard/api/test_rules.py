"""Rules as code: the command `fp8scope rules` against a real server."""

from __future__ import annotations

from pathlib import Path

import pytest
import urllib3
from helpers.live_servers import Server

from fp8scope.cli import main as cli
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.accounts.tokens import create_token
from fp8scope_dashboard.alerts.models import Rule

RULE = """\
version: 1
rules:
  - name: Gradient norm
    statistic: grad_norm
    condition: above
    value: 10
"""


@pytest.fixture(autouse=True)
def connected(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)


def write(path: Path, text: str = RULE) -> str:
    path.write_text(text)
    return str(path)


def test_it_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "rules.yaml")
    assert cli.main(["rules", "apply", file, "--check"]) == 3
    out = capsys.readouterr().out
    assert "+ Gradient norm: created" in out and "nothing was changed" in out
    assert not Rule.objects.filter(name="Gradient norm").exists()
    assert cli.main(["rules", "apply", file]) == 0 and "created" in capsys.readouterr().out
    assert cli.main(["rules", "apply", file]) == 0 and "Nothing to change" in capsys.readouterr().out
    write(tmp_path / "rules.yaml", RULE.replace("10", "20"))
    assert cli.main(["rules", "apply", file]) == 0
    assert "    value: 10.0 -> 20.0\n" in capsys.readouterr().out
    exported = tmp_path / "exported.yaml"
    assert cli.main(["rules", "export", str(exported)]) == 0
    assert cli.main(["rules", "apply", str(exported), "--check", "--prune"]) == 0
    assert cli.main(["rules", "export"]) == 0 and capsys.readouterr().out.endswith(exported.read_text())
    write(tmp_path / "rules.yaml", "version: 1\nrules: []\n")
    assert cli.main(["rules", "apply", file, "--prune"]) == 0
    assert "- Gradient norm: removed" in capsys.readouterr().out
    assert not Rule.objects.filter(name="Gradient norm").exists()


def test_errors_name_the_file_and_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "rules.yaml", RULE.replace("value: 10", "valeu: 10"))
    assert cli.main(["rules", "apply", file]) == 1
    error = capsys.readouterr().err
    assert f"{file}: line 6: valeu: unknown; known here: name, statistic" in error
    assert cli.main(["rules", "apply", str(tmp_path / "none.yaml")]) == 1
    (tmp_path / "latin.yaml").write_bytes(b"version: 1 # \xe9")
    assert cli.main(["rules", "apply", str(tmp_path / "latin.yaml")]) == 1


def test_a_token_reaches_only_its_project(server: Server, tmp_path: Path) -> None:
    other = create_project("other", "Other")
    Rule.objects.create(
        project=other, kind="threshold", name="secret rule", statistic="loss", condition="above"
    )
    assert cli.main(["rules", "apply", write(tmp_path / "rules.yaml"), "--prune"]) == 0
    assert Rule.objects.filter(name="secret rule").exists()
    assert Rule.objects.get(name="Gradient norm").project == server.project
    own = {"Authorization": f"Bearer {create_token(other, 't', scopes=('write', 'read'))[1]}"}
    answer = urllib3.request("GET", f"{server.url}/api/v1/rules", headers=own)
    assert b"secret rule" in answer.data and b"Gradient norm" not in answer.data


@pytest.mark.parametrize("token", ["", "fp8s_wrong"])
def test_needs_a_token(server: Server, token: str) -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    for method in ("GET", "PUT"):
        answer = urllib3.request(method, f"{server.url}/api/v1/rules", headers=headers, body=b"version: 1")
        assert answer.status == 401


def test_refuses_a_body_that_is_no_text(server: Server) -> None:
    headers = {"Authorization": f"Bearer {server.token}"}
    for body in (b"\xff\xfe", b"x" * (1 << 20), b"{" * 5000):
        answer = urllib3.request(
            "PUT", f"{server.url}/api/v1/rules", headers=headers, body=body, timeout=60.0, retries=False
        )
        assert answer.status == 422 and b"error" in answer.data

"""`fp8scope doctor` reports the state of each check, and what to do about a bad one."""

import json
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from agent.helpers.faulty_http import Fault
from agent.helpers.wire_server import WireServer

from fp8scope.cli import doctor
from fp8scope.cli import main as cli
from fp8scope.cli.doctor import (
    CheckResult,
    check_clock,
    check_server,
    check_space,
    check_spool,
    check_step,
    check_torch,
)
from fp8scope.config import Settings


def states(findings: list[CheckResult]) -> dict[str, str]:
    return {one.check: one.state for one in findings}


def test_it_works(
    server: WireServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FP8SCOPE_URL", server.url)
    monkeypatch.setenv("FP8SCOPE_TOKEN", server.token)
    monkeypatch.setenv("FP8SCOPE_DIR", str(tmp_path / "spool"))
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {one["check"]: one["state"] for one in report["findings"]}
    assert report["ok"] is True
    assert {
        name: found[name] for name in ("server", "token", "clock", "spool", "torch", "kernels", "self-test")
    } == dict.fromkeys(("server", "token", "clock", "spool", "torch", "kernels", "self-test"), "ok")
    # It asked, and left nothing behind: neither there nor here.
    assert server.runs == {} and {method for method, _ in server.requests} == {"GET"}
    assert not (tmp_path / "spool").exists() and list(tmp_path.glob(".fp8scope*")) == []


def test_text_output_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "check_step", lambda: CheckResult("self-test", "ok", "left out here"))
    assert cli.main(["doctor", "--dir", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "fail  server" in out and "fp8scope login" in out
    assert cli.main(["doctor", "--url", "no address"]) == 1
    assert "https://" in capsys.readouterr().out


def test_reports_a_refused_token(server: WireServer, settings: Settings) -> None:
    found = check_server(replace(settings, token="fp8s_wrong"))
    assert states(found)["server"] == "ok" and states(found)["token"] == "fail"
    assert "settings page" in found[-1].advice
    assert states(check_server(replace(settings, token="")))["token"] == "fail"


@pytest.mark.parametrize(
    "fault", [Fault(page=True), Fault(status=502), Fault(status=302, headers=(("Location", "http://x/"),))]
)
def test_reports_another_server_at_the_address(fault: Fault, server: WireServer, settings: Settings) -> None:
    server.plan = lambda method, path: fault
    (found,) = check_server(settings)
    assert found.state == "fail" and "is not an fp8scope dashboard" in found.message and found.advice


def test_reports_an_unreachable_server(server: WireServer, settings: Settings) -> None:
    server.stop()
    (found,) = check_server(settings)
    assert found.state == "fail" and "does not answer" in found.message
    (found,) = check_server(replace(settings, mode="offline"))
    assert found.state == "warn" and "FP8SCOPE_MODE" in found.advice


@pytest.mark.parametrize(
    ("seconds", "state", "word"), [(0, "ok", ""), (-3600, "warn", "ahead"), (3600, "warn", "behind")]
)
def test_reports_clock_skew(seconds: float, state: str, word: str) -> None:
    found = check_clock(format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True))
    assert found.state == state and word in found.message and bool(found.advice) == (state == "warn")


@pytest.mark.parametrize("date", ["", "yesterday", "Mon, 99 Foo 2026"])
def test_warns_about_a_missing_or_invalid_date(date: str) -> None:
    assert check_clock(date).state == "warn"


def test_reports_an_unwritable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    found = check_spool(tmp_path / "file" / "spool")
    assert found.state == "fail" and "FP8SCOPE_DIR" in found.advice
    assert check_spool(tmp_path / "not" / "there" / "yet").state == "ok"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.parametrize(("free", "state"), [(1 << 20, "fail"), (1 << 30, "warn"), (1 << 40, "ok")])
def test_reports_low_disk_space(
    free: int, state: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        def __init__(self) -> None:
            self.free = free

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage())
    assert check_space(settings).state == state


def test_reports_why_the_self_test_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SELF_TEST", "raise RuntimeError('planned')")
    found = check_step()
    assert found.state == "fail" and "RuntimeError: planned" in found.message
    monkeypatch.setattr(doctor, "SELF_TEST", "import os; os.abort()")
    assert check_step().state == "fail"


def test_reports_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from fp8scope_kernels import devices

    # The answers are kept for the process; here they change.
    monkeypatch.setattr(devices, "capabilities_of", devices.capabilities_of.__wrapped__)

    def pretend(capability: tuple[int, int]) -> dict[str, str]:
        monkeypatch.setattr(devices, "accelerators", lambda: [torch.device("cuda", 0)])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
        return states(check_torch())

    assert pretend((9, 0))["gpu"] == pretend((8, 9))["gpu"] == pretend((12, 0))["gpu"] == "ok"
    assert pretend((8, 0))["gpu"] == "warn"


def test_reports_missing_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fp8scope_kernels.cpu import levels as cpu_levels
    from fp8scope_kernels.cpu import library as cpu_library

    assert states(doctor.check_kernels()) == {"kernels": "ok"}
    monkeypatch.setattr(cpu_library, "_library", None)
    monkeypatch.setattr(cpu_levels, "path", lambda level: tmp_path / "none.so")
    (finding,) = doctor.check_kernels()
    assert finding.state == "warn"
    assert "eager torch" in finding.message and "run pip install -e ." in finding.message


def test_reports_a_check_that_raises(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise ZeroDivisionError("planned")

    for name in ("check_server", "check_torch", "check_step"):
        monkeypatch.setattr(doctor, name, broken)
    found = states(doctor.examine(settings))
    assert found["server"] == found["torch"] == found["self-test"] == "fail" and found["spool"] == "ok"


@pytest.mark.parametrize("copied", [True, False])
def test_a_crash_or_hang_of_the_self_test_is_contained(copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a copy of this process, which has torch already, and in a new one."""
    if not copied:
        monkeypatch.delattr(os, "fork")
    assert check_step().message == "One FP8 step: 3 tensors observed."
    monkeypatch.setattr(doctor, "SELF_TEST", "import atexit, sys; print('x'); sys.exit(3)")
    assert check_step().state == "fail"
    monkeypatch.setattr(doctor, "SELF_TEST", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "SELF_TEST_SECONDS", 1)
    assert "took longer than 1 s" in check_step().message

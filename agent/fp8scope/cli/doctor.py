"""`fp8scope doctor`: will a training run on this machine be recorded, and if not, what has to be done?

It leaves nothing behind: no run is registered. That the server would take one is told by a read that only a
good token may do; that this machine can observe FP8 by one step of a small model whose telemetry is thrown
away; that it can write a spool by writing, reading and removing one.
"""

import argparse
import json
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal

import urllib3

from fp8scope.config import GIB, MIB, ConfigurationError, Settings, settings_from
from fp8scope.metadata.environment import gpu_names, version_of
from fp8scope.recording.records import RecordKind
from fp8scope.recording.spool import Spool

ANSWER_SECONDS = 10.0
MOST_SKEW_SECONDS = 60.0
FP8_CAPABILITY = 8.9
"""Compute capability from which NVIDIA GPUs multiply FP8: Ada, Hopper and later."""

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. `advice` says what to do; empty when nothing is to be done."""

    check: str
    state: State
    message: str
    advice: str = ""


def doctor(arguments: list[str]) -> int:
    """Check that runs on this machine will be recorded; says what to do where they would not."""
    parser = argparse.ArgumentParser(prog="fp8scope doctor", description=doctor.__doc__)
    parser.add_argument("--url", help="the server (else FP8SCOPE_URL, else `fp8scope login`)")
    parser.add_argument("--project", help="which login to use")
    parser.add_argument("--dir", type=Path, help="the spool directory (else FP8SCOPE_DIR)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    options = parser.parse_args(arguments)
    try:
        settings = settings_from(url=options.url, project=options.project, directory=options.dir)
    except ConfigurationError as error:
        findings = [Finding("settings", "fail", str(error), "Correct it, then run fp8scope doctor again.")]
    else:
        findings = examine(settings)
    if options.json:
        report = {"ok": not _failed(findings), "findings": [asdict(one) for one in findings]}
        print(json.dumps(report, indent=2))
    else:
        for one in findings:
            print(f"{one.state:<5} {one.check:<11} {one.message}")
            if one.advice:
                print(f"{'':<18}{one.advice}")
    return 1 if _failed(findings) else 0


def examine(settings: Settings) -> list[Finding]:
    """Every check, in the order in which a run would need them."""
    findings = [Finding("python", "ok", f"{platform.python_version()}, fp8scope {version_of('fp8scope')}")]
    findings += _guarded("server", lambda: check_server(settings))
    findings += _guarded("spool", lambda: [check_spool(settings.directory), check_space(settings)])
    findings += _guarded("torch", check_torch)
    findings += _guarded("kernels", check_kernels)
    findings += _guarded("self-test", lambda: [check_step()])
    return findings


def _failed(findings: list[Finding]) -> bool:
    return any(one.state == "fail" for one in findings)


def _guarded(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as error:
        return [
            Finding(name, "fail", f"{type(error).__name__}: {error}", "Report this: it should not happen.")
        ]


# The server


def check_server(settings: Settings) -> list[Finding]:
    """Connection, clock, version and token, as far as each can be told without the one before."""
    if settings.mode != "online":
        how = {"offline": "runs are only kept, for `fp8scope sync`", "disabled": "nothing is recorded"}
        advice = "Unset FP8SCOPE_MODE, or set it to online."
        return [Finding("server", "warn", f"FP8SCOPE_MODE={settings.mode}: {how[settings.mode]}.", advice)]
    if not settings.url:
        advice = "Run fp8scope login https://YOUR-SERVER, or set FP8SCOPE_URL and FP8SCOPE_TOKEN."
        return [Finding("server", "fail", "No server is known: runs are only kept on disk.", advice)]
    # A run that nobody has: a good token is told so, a bad one is told that.
    headers = {"Authorization": f"Bearer {settings.token}"} if settings.token else {}
    try:
        answer = urllib3.request(
            "GET",
            f"{settings.url}/api/v1/runs/{uuid.UUID(int=0)}",
            headers=headers,
            timeout=ANSWER_SECONDS,
            retries=False,
            redirect=False,
        )
    except urllib3.exceptions.HTTPError as error:
        reason = str(error).rpartition(": ")[2]
        advice = "Is the server up, the address right, and reachable from here (proxy, firewall)?"
        return [Finding("server", "fail", f"{settings.url} does not answer: {reason}.", advice)]
    code = _error_code(answer.data)
    if code not in ("unknown_run", "bad_token", "no_token"):
        message = f"{settings.url} answers HTTP {answer.status}, but not as an fp8scope dashboard does."
        advice = (
            "Is this the dashboard's own address, with its path if it has one, and not a sign-in proxy's?"
        )
        return [Finding("server", "fail", message, advice)]
    findings = [Finding("server", "ok", f"{settings.url} answers."), *_server_version(settings.url)]
    findings.append(check_clock(answer.headers.get("Date", "")))
    if code == "unknown_run":
        findings.append(Finding("token", "ok", "The server accepts it."))
    else:
        what = "The server does not accept it." if settings.token else "There is none."
        advice = f"Make one on the project's settings page, then: fp8scope login {settings.url}"
        findings.append(Finding("token", "fail", what, advice))
    return findings


def _error_code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, TypeError, KeyError):
        return ""


def _server_version(url: str) -> list[Finding]:
    """The server's version beside ours; nothing where it does not tell."""
    try:
        answer = urllib3.request("GET", f"{url}/api/v1/openapi.json", timeout=ANSWER_SECONDS, retries=False)
        theirs = str(json.loads(answer.data)["info"]["version"])
    except (urllib3.exceptions.HTTPError, ValueError, TypeError, KeyError):
        return []
    ours = version_of("fp8scope")
    if not re.match(r"\d+\.\d+", theirs) or _minor(theirs) == _minor(ours):
        return [Finding("version", "ok", f"server {theirs}, here {ours}")]
    advice = "Both speak protocol 1; install the same minor version to have every feature."
    return [Finding("version", "warn", f"The server has {theirs}, this machine {ours}.", advice)]


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def check_clock(date: str) -> Finding:
    """This machine's clock against the server's Date header (whole seconds, HTTP's format)."""
    try:
        skew = (datetime.now(UTC) - parsedate_to_datetime(date)).total_seconds()
    except (ValueError, TypeError):
        return Finding(
            "clock", "warn", "The server does not tell the time.", "Some proxy removes its Date header."
        )
    if abs(skew) <= MOST_SKEW_SECONDS:
        return Finding("clock", "ok", f"{abs(skew):.0f} s from the server's.")
    direction = "ahead of" if skew > 0 else "behind"
    advice = "Charts over time will not fit other machines' runs: turn on NTP (chrony, systemd-timesyncd)."
    return Finding("clock", "warn", f"{abs(skew):.0f} s {direction} the server's.", advice)


# This machine


def check_spool(directory: Path) -> Finding:
    """Write a record there as a run does, read it back, and remove it."""
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(dir=nearest, prefix=".fp8scope-doctor-") as place:
            spool = Spool(Path(place), durable=True)
            spool.append(RecordKind.EVALUATION, b"{}")
            record, in_memory = spool.read(0), spool.in_memory()
            spool.close()
    except OSError as error:
        reason = error.strerror or str(error)
        advice = "Set FP8SCOPE_DIR (or init(directory=...)) to a directory of yours on a local disk."
        return Finding("spool", "fail", f"{directory} cannot be written: {reason}.", advice)
    if in_memory or record is None or record.payload != b"{}":
        advice = "Is the disk full, or a quota reached? Set FP8SCOPE_DIR to another one."
        return Finding("spool", "fail", f"{directory} does not keep what is written to it.", advice)
    return Finding("spool", "ok", f"{directory} can be written.")


def check_space(settings: Settings) -> Finding:
    """Free space where the spool is, against its bound."""
    nearest = next(path for path in (settings.directory, *settings.directory.parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    text = f"{free / GIB:.1f} GiB free; one run's spool takes {settings.spool_bytes / GIB:.3g} GiB at most."
    if free < 64 * MIB:
        return Finding("space", "fail", text, "Free some, or set FP8SCOPE_DIR to another disk.")
    if free < settings.spool_bytes:
        advice = (
            "Enough while the server answers; in a long outage it may fill. FP8SCOPE_SPOOL_MIB bounds it."
        )
        return Finding("space", "warn", text, advice)
    return Finding("space", "ok", text)


def check_torch() -> list[Finding]:
    """torch, and whether the GPU multiplies FP8. A driver without a usable torch is told."""
    gpu = ", ".join(gpu_names())
    try:
        import torch
    except ImportError as error:
        advice = "pip install 'fp8scope[torch]'; without it only numbers can be logged, no tensors."
        return [Finding("torch", "warn", f"torch cannot be imported: {error}.", advice)]
    found = [Finding("torch", "ok", torch.__version__)]
    if not torch.cuda.is_available():
        if gpu:
            advice = f"This torch ({torch.__version__}) was built for another driver, or for the CPU."
            return [*found, Finding("gpu", "warn", f"{gpu} is there, but torch cannot use it.", advice)]
        return [*found, Finding("gpu", "warn", "No GPU: FP8 is emulated on the CPU, for trying out only.")]
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        name = f"{torch.cuda.get_device_name(index)} (compute capability {major}.{minor})"
        if torch.version.hip or float(f"{major}.{minor}") >= FP8_CAPABILITY:
            found.append(Finding("gpu", "ok", f"{name} multiplies FP8."))
        else:
            advice = "Training in FP8 runs, but emulated and slow; BF16 with shadow mode is of use."
            found.append(Finding("gpu", "warn", f"{name} has no FP8 units.", advice))
    return found


def check_kernels() -> list[Finding]:
    """Whether the CPU's compiled kernels can be loaded; nothing without torch (see `check_torch`)."""
    if not version_of("torch"):
        return []
    from fp8scope_kernels.cpu import library as cpu_library

    try:
        level = cpu_library.available_levels()[-1].name
        cpu_library.library()
    except RuntimeError as error:
        message = f"Quantisation on the CPU runs in eager torch, several times slower: {error}."
        return [Finding("kernels", "warn", message)]
    return [Finding("kernels", "ok", f"The CPU's compiled kernels can be loaded ({level}).")]


SELF_TEST = """
import torch, fp8scope
from fp8scope_kernels import StatisticsBuffer, observe
model = torch.nn.Sequential(torch.nn.Linear(64, 64))
fp8scope.convert(model, fp8scope.CurrentScaling())
run = fp8scope.init(name="self-test", mode="disabled")
buffer = StatisticsBuffer()
observe(model, buffer)
with run.step() as step:
    x = torch.randn(16, 64)
    loss = model(x).square().mean()
    loss.backward()
    step.log(loss=loss)
assert torch.isfinite(loss), f"the loss is {loss}"
observed = int((buffer.data[:, 0] > 0).sum())
assert observed == 3, f"{observed} of 3 tensors were observed"
print(observed)
"""
SELF_TEST_SECONDS = 300


def _self_test() -> "subprocess.CompletedProcess[str]":
    """Run SELF_TEST in another process. Raises subprocess.TimeoutExpired after SELF_TEST_SECONDS.

    A copy of this process has torch already, whose import is most of what a new one takes. A device that is
    in use here could not be used in a copy.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(os, "fork") or torch.cuda.is_initialized():
        return subprocess.run(
            [sys.executable, "-c", SELF_TEST],
            capture_output=True,
            text=True,
            timeout=SELF_TEST_SECONDS,
            check=False,
            env={**os.environ, "FP8SCOPE_MODE": "disabled"},
        )
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = multiprocessing.get_context("fork").Process(
            target=_test_in_copy, args=(SELF_TEST, out.fileno(), err.fileno())
        )
        child.start()
        child.join(SELF_TEST_SECONDS)
        if child.exitcode is None:
            child.kill()
            child.join()
            raise subprocess.TimeoutExpired("the self-test", SELF_TEST_SECONDS)
        told = [(file.seek(0), file.read())[1] for file in (out, err)]
    return subprocess.CompletedProcess("the self-test", child.exitcode, *told)


def _test_in_copy(program: str, out: int, err: int) -> None:
    import torch

    # Threads that torch may have started are not in this copy, and nobody may wait for them.
    torch.set_num_threads(1)
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    status = 0
    try:
        exec(program, {"__name__": "self-test"})
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing of the process that this is a copy of is to end here.
    os._exit(status)


def check_step() -> Finding:
    """One FP8 step of a small model on the CPU, in a process of its own: a crash there is only told."""
    if not version_of("torch"):
        return Finding("self-test", "warn", "Left out: it needs torch.")
    try:
        done = _self_test()
    except subprocess.TimeoutExpired:
        message = f"One FP8 step took longer than {SELF_TEST_SECONDS} s."
        return Finding("self-test", "fail", message, "Is this machine out of memory, or its disk asleep?")
    if done.returncode == 0:
        return Finding("self-test", "ok", f"One FP8 step, {done.stdout.strip()} tensors observed.")
    why = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
    return Finding("self-test", "fail", why[:500], "Try it by hand: python -c 'import fp8scope, torch'.")

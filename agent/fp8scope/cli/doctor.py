"""`fp8scope doctor`: check whether runs on this machine will be recorded, and what to do if not.

It imports what the agent needs only in its checks, so that it works where a package is broken.

The checks leave nothing behind, and no run is registered. The server is checked with a read that needs a
valid token, FP8 with one step of a small model whose telemetry is discarded, and the spool by writing,
reading and removing a record.
"""

import argparse
import importlib
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal

from fp8scope.config import GIB, MIB, ConfigurationError, Settings, settings_from
from fp8scope.metadata.environment import gpu_names, version_of

ANSWER_SECONDS = 10.0
MAX_SKEW_SECONDS = 60.0

PACKAGES = {"numpy": "numpy>=1.26,<3", "urllib3": "urllib3>=2.2,<3"}
"""The packages that the agent requires, besides torch."""

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class CheckResult:
    """One line of the report. `advice` says what to do; empty if there is nothing to do."""

    check: str
    state: State
    message: str
    advice: str = ""


def doctor(arguments: list[str]) -> int:
    """Check whether runs on this machine will be recorded, and say what to do if not."""
    parser = argparse.ArgumentParser(prog="fp8scope doctor", description=doctor.__doc__)
    parser.add_argument("--url", help="the server's address (default: FP8SCOPE_URL, or `fp8scope login`)")
    parser.add_argument("--project", help="the project whose login to use")
    parser.add_argument("--dir", type=Path, help="the spool directory (default: FP8SCOPE_DIR)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    try:
        settings = settings_from(url=options.url, project=options.project, directory=options.dir)
    except ConfigurationError as error:
        findings = [
            CheckResult("settings", "fail", str(error), "Correct it, then run `fp8scope doctor` again.")
        ]
    else:
        findings = examine(settings)
    if options.json:
        report = {"ok": not _failed(findings), "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=2))
    else:
        for finding in findings:
            print(f"{finding.state:<5} {finding.check:<11} {finding.message}")
            if finding.advice:
                print(f"{'':<18}{finding.advice}")
    return 1 if _failed(findings) else 0


def examine(settings: Settings) -> list[CheckResult]:
    """Run every check, in the order in which a run depends on them."""
    findings = [
        CheckResult("python", "ok", f"{platform.python_version()}, fp8scope {version_of('fp8scope')}")
    ]
    findings += _guarded("packages", check_packages)
    if _failed(findings):
        # The other checks need them.
        return findings
    findings += _guarded("server", lambda: check_server(settings))
    findings += _guarded("spool", lambda: [check_spool(settings.directory), check_space(settings)])
    findings += _guarded("torch", check_torch)
    findings += _guarded("kernels", check_kernels)
    findings += _guarded("self-test", lambda: [check_step()])
    return findings


def _failed(findings: list[CheckResult]) -> bool:
    return any(finding.state == "fail" for finding in findings)


def _guarded(name: str, check: Callable[[], list[CheckResult]]) -> list[CheckResult]:
    try:
        return check()
    except Exception as error:
        return [
            CheckResult(name, "fail", f"{type(error).__name__}: {error}", "This is a bug: please report it.")
        ]


def check_packages() -> list[CheckResult]:
    """Import what a training machine needs. What cannot be imported makes a run unrecorded."""
    findings = []
    for name, requirement in PACKAGES.items():
        try:
            importlib.import_module(name)
        except Exception as error:
            message = f"{name} cannot be imported: {' '.join(str(error).split())}"
            findings.append(CheckResult("packages", "fail", message, f"Run `pip install '{requirement}'`."))
    if findings:
        return findings
    versions = ", ".join(f"{name} {version_of(name)}" for name in PACKAGES)
    from fp8scope.delivery.arrow_stream import can_compress

    if not can_compress():
        advice = "Run `pip install backports.zstd`."
        return [
            CheckResult("packages", "warn", f"{versions}. Without zstd, data is sent uncompressed.", advice)
        ]
    return [CheckResult("packages", "ok", f"{versions}.")]


# The server


def check_server(settings: Settings) -> list[CheckResult]:
    """Check connection, version, clock and token; stops at the first one that the others depend on."""
    from fp8scope.cli.server import UNKNOWN_RUN, probe

    if settings.mode != "online":
        meaning = {
            "offline": "runs are only stored on disk, for `fp8scope sync`",
            "disabled": "nothing is recorded",
        }
        advice = "Unset FP8SCOPE_MODE, or set it to online."
        return [
            CheckResult("server", "warn", f"FP8SCOPE_MODE={settings.mode}: {meaning[settings.mode]}.", advice)
        ]
    if not settings.url:
        advice = "Run `fp8scope login https://YOUR-SERVER`, or set FP8SCOPE_URL and FP8SCOPE_TOKEN."
        return [
            CheckResult("server", "fail", "No server is configured: runs are only stored on disk.", advice)
        ]
    outcome = probe(settings)
    if outcome.status == 0:
        advice = "Is the server running, the address correct, and reachable from here (proxy, firewall)?"
        return [CheckResult("server", "fail", f"{settings.url} does not answer: {outcome.message}.", advice)]
    if outcome.code not in (UNKNOWN_RUN, "bad_token", "no_token"):
        message = f"{settings.url} answers HTTP {outcome.status}, but is not an fp8scope dashboard."
        advice = "Is this the address of the dashboard, with its path if it has one, and not of a proxy?"
        return [CheckResult("server", "fail", message, advice)]
    findings = [
        CheckResult("server", "ok", f"{settings.url} answers."),
        *check_version_and_clock(settings.url, settings.token),
    ]
    if outcome.code == UNKNOWN_RUN:
        findings.append(CheckResult("token", "ok", "The server accepts the token."))
    else:
        message = f"The server refuses it: {outcome.message}" if settings.token else "There is no token."
        advice = f"Create one on the project's settings page, then run `fp8scope login {settings.url}`."
        findings.append(CheckResult("token", "fail", message, advice))
    return findings


def check_version_and_clock(url: str, token: str = "") -> list[CheckResult]:
    """Compare the version and the clock of the server with ours."""
    import urllib3

    try:
        response = urllib3.request(
            "GET",
            f"{url}/api/v1/openapi.json",
            # A server may keep the description of its API private.
            headers={"Authorization": f"Bearer {token}"} if token else None,
            timeout=ANSWER_SECONDS,
            retries=False,
        )
    except urllib3.exceptions.HTTPError as error:
        return [
            CheckResult("version", "warn", f"The server does not tell its version: {type(error).__name__}.")
        ]
    clock = check_clock(response.headers.get("Date", ""))
    try:
        version = str(json.loads(response.data)["info"]["version"])
    except (ValueError, TypeError, KeyError):
        return [clock]
    return [check_version(version), clock]


def check_version(theirs: str) -> CheckResult:
    """Compare the server's version with ours: the minor versions should be the same."""
    ours = version_of("fp8scope")
    if not re.match(r"\d+\.\d+", theirs) or _minor(theirs) == _minor(ours):
        return CheckResult("version", "ok", f"server {theirs}, this machine {ours}")
    advice = "Both use protocol 1; install the same minor version to have every feature."
    return CheckResult("version", "warn", f"The server has {theirs}, this machine {ours}.", advice)


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def check_clock(date: str) -> CheckResult:
    """Compare this machine's clock with the server's Date header, which has whole seconds."""
    try:
        skew = (datetime.now(UTC) - parsedate_to_datetime(date)).total_seconds()
    except (ValueError, TypeError):
        return CheckResult(
            "clock", "warn", "The server sends no time.", "A proxy may remove the Date header."
        )
    if abs(skew) <= MAX_SKEW_SECONDS:
        return CheckResult("clock", "ok", f"{abs(skew):.0f} s from the server's.")
    direction = "ahead of" if skew > 0 else "behind"
    advice = "Charts over time will not line up with other machines: enable NTP (chrony, systemd-timesyncd)."
    return CheckResult("clock", "warn", f"{abs(skew):.0f} s {direction} the server's.", advice)


# This machine


def check_spool(directory: Path) -> CheckResult:
    """Write a record to a spool in `directory`, read it back, and remove it."""
    from fp8scope.recording.records import RecordKind
    from fp8scope.recording.spool import Spool

    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(dir=nearest, prefix=".fp8scope-doctor-") as folder:
            spool = Spool(Path(folder), durable=True)
            spool.append(RecordKind.EVALUATION, b"{}")
            record, in_memory = spool.read(0), spool.in_memory()
            spool.close()
    except OSError as error:
        reason = error.strerror or str(error)
        advice = "Set FP8SCOPE_DIR (or init(directory=...)) to a writable directory on a local disk."
        return CheckResult("spool", "fail", f"{directory} cannot be written: {reason}.", advice)
    if in_memory or record is None or record.payload != b"{}":
        advice = "Is the disk full, or a quota exceeded? Set FP8SCOPE_DIR to another disk."
        return CheckResult("spool", "fail", f"{directory} does not keep written data.", advice)
    return CheckResult("spool", "ok", f"{directory} can be written.")


def check_space(settings: Settings) -> CheckResult:
    """Compare the free space at the spool directory with the maximum size of a spool."""
    nearest = next(path for path in (settings.directory, *settings.directory.parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    text = f"{free / GIB:.1f} GiB free; a run's spool takes at most {settings.spool_bytes / GIB:.3g} GiB."
    if free < 64 * MIB:
        return CheckResult("space", "fail", text, "Free some space, or set FP8SCOPE_DIR to another disk.")
    if free < settings.spool_bytes:
        advice = "Enough while the server answers; an outage may fill the disk. FP8SCOPE_SPOOL_MIB limits it."
        return CheckResult("space", "warn", text, advice)
    return CheckResult("space", "ok", text)


def check_torch() -> list[CheckResult]:
    """Check that torch can be imported, that it can use the accelerators, and that these have FP8 units."""
    gpu = ", ".join(gpu_names())
    try:
        import torch
    except ImportError as error:
        advice = "pip install 'fp8scope[torch]'; without torch only numbers can be logged, no tensors."
        return [CheckResult("torch", "warn", f"torch cannot be imported: {error}.", advice)]
    findings = [CheckResult("torch", "ok", torch.__version__)]
    from fp8scope_kernels import devices

    accelerators = devices.accelerators()
    if not accelerators:
        if gpu:
            advice = f"This torch ({torch.__version__}) is built for another driver, or for the CPU only."
            return [*findings, CheckResult("gpu", "warn", f"torch cannot use {gpu}.", advice)]
        return [
            *findings,
            CheckResult("gpu", "warn", "No GPU: FP8 is emulated on the CPU, for trying it out."),
        ]
    for device in accelerators:
        architecture = devices.architecture_of(device)
        name = f"{devices.name_of(device)} ({architecture or device.type})"
        capabilities = devices.capabilities_of(device)
        if capabilities.units:
            formats = {"ocp": "E4M3 and E5M2", "fnuz": "E4M3FNUZ and E5M2FNUZ"}[capabilities.encoding]
            findings.append(CheckResult("gpu", "ok", f"{name} has FP8 units, for {formats}."))
        else:
            advice = "FP8 training is emulated and slow here; use BF16 with shadow mode instead."
            findings.append(CheckResult("gpu", "warn", f"{name} has no FP8 units that torch uses.", advice))
    return findings


def check_kernels() -> list[CheckResult]:
    """Check that the compiled CPU kernels can be loaded. Empty without torch, see `check_torch`."""
    if not version_of("torch"):
        return []
    from fp8scope_kernels.cpu import library as cpu_library

    try:
        level = cpu_library.available_levels()[-1].name
        cpu_library.library()
    except RuntimeError as error:
        message = f"Quantisation on the CPU uses eager torch, which is several times slower: {error}."
        return [CheckResult("kernels", "warn", message)]
    return [CheckResult("kernels", "ok", f"The compiled CPU kernels can be loaded ({level}).")]


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


def _cannot_fork() -> bool:
    """Return whether a fork of this process would gain nothing, or could not use the accelerator."""
    if "torch" not in sys.modules:
        return True
    from fp8scope_kernels import devices

    return devices.is_initialized()


def _self_test() -> "subprocess.CompletedProcess[str]":
    """Run SELF_TEST in another process. Raises subprocess.TimeoutExpired after SELF_TEST_SECONDS.

    A forked process saves the import of torch, which takes most of the time. It cannot be used if an
    accelerator is initialised here.
    """
    if not hasattr(os, "fork") or _cannot_fork():
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
            target=_test_in_fork, args=(SELF_TEST, out.fileno(), err.fileno())
        )
        child.start()
        child.join(SELF_TEST_SECONDS)
        if child.exitcode is None:
            child.kill()
            child.join()
            raise subprocess.TimeoutExpired("the self-test", SELF_TEST_SECONDS)
        output = [(file.seek(0), file.read())[1] for file in (out, err)]
    return subprocess.CompletedProcess("the self-test", child.exitcode, *output)


def _test_in_fork(program: str, out: int, err: int) -> None:
    import torch

    # The threads of torch do not exist in a forked process: nothing may wait for them.
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
    # Skip the exit handlers of the parent.
    os._exit(status)


def check_step() -> CheckResult:
    """Run one FP8 step of a small model on the CPU, in another process, which may crash."""
    if not version_of("torch"):
        return CheckResult("self-test", "warn", "Skipped: it needs torch.")
    try:
        done = _self_test()
    except subprocess.TimeoutExpired:
        message = f"One FP8 step took longer than {SELF_TEST_SECONDS} s."
        return CheckResult(
            "self-test", "fail", message, "Is this machine out of memory, or is the disk stalled?"
        )
    if done.returncode == 0:
        return CheckResult("self-test", "ok", f"One FP8 step: {done.stdout.strip()} tensors observed.")
    reason = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
    return CheckResult("self-test", "fail", reason[:500], "Try `python -c 'import fp8scope, torch'`.")

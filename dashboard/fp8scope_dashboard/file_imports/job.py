"""Run one import: write the files, start the importer with a token of its own, follow it, and clean up."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import UUID

from django.conf import settings
from django.db import transaction

from fp8scope_dashboard.accounts.tokens import TokenError
from fp8scope_dashboard.file_imports import limited_importer, limits, services
from fp8scope_dashboard.file_imports.models import ImportChunk, ImportJob
from fp8scope_dashboard.file_imports.output import ImporterOutput

logger = logging.getLogger(__name__)

SCRIPT: Final = str(Path(limited_importer.__file__).resolve())
FOLDER_PREFIX: Final = "fp8scope-import-"
POLL_SECONDS: Final = 0.1
REPORT_SECONDS: Final = 1.0
LEFT_BEHIND_SECONDS: Final = limits.SECONDS + 300
# Of the worker's environment; above all not the secret key, and not the address of the database.
PASSED_ON: Final = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR")


def run(job_id: UUID) -> None:
    """Run an import, if it still waits. Whatever happens, its files are deleted and its token is revoked."""
    job = services.claim(job_id)
    if job is None:
        return
    if not services.can_import():
        services.finish(job, problems=[services.MISSING])
        return
    output = ImporterOutput()
    problem = ""
    try:
        with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True) as folder:
            problem = _import(job, Path(folder), output)
    except TokenError as error:
        problem = str(error)
    except Exception:
        logger.exception("The import %s failed", job.pk)
        problem = "The import failed on the server; its log has the reason."
    finally:
        problems = [*output.problems, *([problem] if problem else [])]
        services.finish(
            job, results=output.results, notes=output.notes, problems=problems[: limits.MAX_SENTENCES]
        )


def remove_left_behind() -> None:
    """Delete the folders of imports whose worker was killed: none lives longer than the longest import."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        # Another worker may delete it at the same time.
        with suppress(FileNotFoundError):
            status = folder.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_ours and time.time() - status.st_mtime > LEFT_BEHIND_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _import(job: ImportJob, folder: Path, output: ImporterOutput) -> str:
    """Start the importer and wait for it. Returns what went wrong beside what it says, or nothing."""
    path = _write_files(job, folder)
    secret = services.give_token(job)
    services.change(job, stage="Reading the files")
    output.hide(str(folder / path.parts[0]) + "/", "")
    output.hide(secret, "…")
    process = subprocess.Popen(
        _command(job, folder, path),
        env=_environment(folder, secret),
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output.follow(process)
        problem = _wait(job, process, output)
    finally:
        process.kill()
        process.wait()
        output.end()
    return problem or output.problem_of(process.returncode)


def _write_files(job: ImportJob, folder: Path) -> Path:
    """Write the uploaded files below a folder of the project. Returns what to import, relative to `folder`.

    Paths name runs whose files carry no id, so the same file of the same project has the same path.
    """
    root = Path(f"project-{job.project_id}")
    (folder / root).mkdir()
    names: dict[str, None] = {}
    chunks = ImportChunk.objects.filter(job=job).order_by("number")
    with transaction.atomic():
        for chunk in chunks.iterator(chunk_size=1):
            names[chunk.name] = None
            # The names were checked when they were accepted; this is the last place that could write
            # elsewhere.
            with (folder / root / Path(chunk.name).name).open("ab") as file:
                file.write(chunk.body)
    only = next(iter(names))
    return root / only if len(names) == 1 and not only.lower().endswith(".zip") else root


def _command(job: ImportJob, folder: Path, path: Path) -> list[str]:
    """The importer in isolated mode: no module is looked for beside the uploaded files."""
    bounds = (os.getpid(), limits.MEMORY_BYTES, limits.SECONDS, limits.UNPACKED_BYTES, limits.MAX_ENTRIES)
    limited = [sys.executable, "-I", "-S", SCRIPT, *map(str, bounds), str(limits.MAX_FOLDERS)]
    options = [f"--{name}={value}" for name, value in sorted(job.options.items()) if value]
    return [*limited, str(folder), str(path), sys.executable, "-I", "-m", "fp8scope", "import", *options]


def _environment(folder: Path, secret: str) -> dict[str, str]:
    """The environment of the importer. The token is not among its arguments, which others can read."""
    return {
        **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "FP8SCOPE_DIR": str(folder / "spool"),
        "FP8SCOPE_URL": settings.BASE_URL,
        "FP8SCOPE_TOKEN": secret,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "ARROW_DEFAULT_MEMORY_POOL": "system",
        "PYTHONUNBUFFERED": "1",
    }


def _wait(job: ImportJob, process: subprocess.Popen[bytes], output: ImporterOutput) -> str:
    """Wait until the importer ends; say meanwhile how far it is. Returns why it was ended, or nothing."""
    deadline, report_at = time.monotonic() + limits.SECONDS, 0.0
    while process.poll() is None:
        now = time.monotonic()
        if now > deadline:
            took = f"The import took longer than {limits.SECONDS} seconds"
            return f"{took}: import a part, or run fp8scope import."
        if now >= report_at:
            report_at = now + REPORT_SECONDS
            stage = output.stage or "Reading the files"
            if not services.change(job, stage=stage, share=output.share, results=output.results):
                return "The import was given to another worker."
        time.sleep(POLL_SECONDS)
    return ""

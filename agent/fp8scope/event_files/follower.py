"""Follows a log directory: its runs are found, and sent in turns."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fp8scope.event_files.log_directory import RunDirectory, run_id_of, runs_in
from fp8scope.event_files.upload import PATIENCE, RunDescription, RunRefusedError, RunUpload, Sending

SCAN_SHARE: Final = 20
"""Looking for new files takes at most this part of the time."""
MAX_NAME: Final = 200


@dataclass(frozen=True, kw_only=True)
class FollowOptions:
    """Names of the runs, and the time after which they have ended.

    Attributes:
        name: begins the names of the runs; that of the log directory if it is empty.
        precision: of the training.
        project: the project that was asked for.
        ended_after: seconds without a new value after which a run that is first met has ended.
        patience: seconds of waiting for the server after which it is said.
    """

    name: str = ""
    precision: str = "unknown"
    project: str = ""
    ended_after: float = 3_600.0
    patience: float = PATIENCE


@dataclass(kw_only=True)
class FollowedRun:
    """A run, and how far it has come. `is_over`: the server refuses it, and that was said."""

    upload: RunUpload
    said: set[str] = field(default_factory=set)
    is_over: bool = False
    is_read: bool = False


class DirectoryFollower:
    """Sends the event files below a directory, and what is added to them.

    Args:
        say: tells the user something.
        wait: sleeps for so many seconds.
    """

    def __init__(
        self,
        root: Path,
        transport: Sending,
        options: FollowOptions,
        *,
        say: Callable[[str], None],
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.runs: dict[str, FollowedRun] = {}
        self._root = root
        self._transport = transport
        self._options = options
        self._say = say
        self._wait = wait
        self._scan_at = 0.0

    @property
    def sent(self) -> int:
        """The values that were sent."""
        return sum(run.upload.sent for run in self.runs.values())

    @property
    def sent_media(self) -> int:
        """The images and texts that were sent."""
        return sum(run.upload.sent_media for run in self.runs.values())

    def turn(self) -> bool:
        """Send what is there; returns whether anything was read.

        Raises:
            SendingRefusedError: the server takes nothing.
            TooManyRunsError: the directory has too many runs.
        """
        self._scan()
        has_read = False
        for run in list(self.runs.values()):
            if not run.is_over:
                has_read |= self._send(run)
        return has_read

    def _scan(self) -> None:
        began = time.monotonic()
        if began < self._scan_at:
            return
        for directory in runs_in(self._root):
            run = self.runs.get(directory.path)
            if run is None:
                run = self.runs[directory.path] = FollowedRun(upload=self._upload_of(directory))
            run.upload.add_files(list(directory.files))
        now = time.monotonic()
        self._scan_at = now + SCAN_SHARE * (now - began)

    def _upload_of(self, directory: RunDirectory) -> RunUpload:
        options, is_root = self._options, directory.path == "."
        first = options.name or (self._root.resolve().name or "logs" if is_root else "")
        name = first if is_root else f"{first}/{directory.path}" if first else directory.path
        scope = f"{options.name}\n{options.project}"
        description = RunDescription(
            id=run_id_of(self._root, directory, scope),
            name=name[-MAX_NAME:],
            precision=options.precision,
            environment={"hostname": socket.gethostname(), "log_directory": str(self._root / directory.path)},
        )
        return RunUpload(
            description=description,
            directory=self._root / directory.path,
            transport=self._transport,
            say=self._say,
            wait=self._wait,
            patience=options.patience,
        )

    def _send(self, run: FollowedRun) -> bool:
        """Send what a run has, up to its present end."""
        has_read = False
        try:
            while run.upload.turn():
                has_read = True
            if not run.is_read:
                run.is_read = True
                self._end(run)
        except RunRefusedError as error:
            run.is_over = True
            self._say(str(error))
        except OSError as error:
            self._say_once(run, f"{error.filename or run.upload.directory}: {error.strerror or error}")
        self._say_problems(run)
        return has_read

    def _end(self, run: FollowedRun) -> None:
        """Say that a run which has not been written for long has ended. One that goes on is running again."""
        ages = [time.time() - path.stat().st_mtime for path in run.upload.paths]
        if min(ages, default=0.0) >= self._options.ended_after:
            run.upload.finish()

    def _say_problems(self, run: FollowedRun) -> None:
        log, name = run.upload.log, run.upload.description.name
        for file in log.files:
            problem, path = file.records.problem, file.records.path
            if problem.broken_at is not None:
                self._say_once(
                    run, f"{path} is damaged at byte {problem.broken_at}: nothing behind it is read."
                )
            if problem.damaged or file.events.unreadable:
                self._say_once(run, f"{path} has records that are damaged. They are left out.")
        if log.names.left_out:
            some = ", ".join(sorted(log.names.left_out)[:3])
            self._say_once(run, f"{name} has more tags than a run takes; left out are {some}, ...")
        if log.left_out.media:
            self._say_once(run, f"{name} has images or texts that are left out: {log.left_out.media}.")
        if log.left_out.steps:
            self._say_once(run, f"{name} has values at negative steps. They are left out.")

    def _say_once(self, run: FollowedRun, message: str) -> None:
        key = message.partition(" at byte ")[0].partition("; left out are")[0]
        if key not in run.said:
            run.said.add(key)
            self._say(message)

"""The event file of a run: its series, its settings for hparams, its scores, and its alerts as text."""

from collections import defaultdict
from pathlib import Path

import numpy as np

from fp8scope.exporting.content import Progress, RunContent, iso, time_of_step
from fp8scope.exporting.tensorboard.messages import (
    FAILURE,
    RUNNING,
    SUCCESS,
    event,
    hparam_values,
    text_value,
    version_event,
)
from fp8scope.exporting.tensorboard.records import record, scalar_records

STATUS = {"finished": SUCCESS, "failed": FAILURE}
MAX_FOLDER = 100


def write(content: RunContent, folder: Path, progress: Progress) -> Path:
    """Write the event file into a folder of its own below `folder`; returns it.

    It appears when it is complete, and replaces that of an earlier export.
    """
    run_folder = folder / folder_name(content)
    run_folder.mkdir(parents=True, exist_ok=True)
    path = run_folder / f"events.out.tfevents.{int(content.began)}.fp8scope.{content.run.id}"
    draft = run_folder / f"{content.run.id}.part"
    times: dict[int, float] = {}
    with draft.open("wb") as file:
        file.write(record(version_event(content.began)))
        status = STATUS.get(content.run.state, RUNNING)
        group = content.run.group or content.run.name
        for value in hparam_values(group, content.began, content.ended, status, content.settings()):
            file.write(record(event(content.began, 0, value)))
        for series in content.series(progress):
            seconds = series.seconds(content.began)
            file.write(scalar_records(series.tag, seconds, series.steps, series.values))
            times |= dict(zip(series.steps.tolist(), seconds.tolist(), strict=True))
        file.write(_scores(content, times))
        file.write(_texts(content, times))
    draft.replace(path)
    return path


def folder_name(content: RunContent) -> str:
    """The name that TensorBoard shows: that of the run, and the beginning of its id."""
    name = "".join(char if char.isalnum() or char in "-_. " else "_" for char in content.run.name)
    return f"{name[:MAX_FOLDER].strip(' .') or 'run'} {content.run.id[:8]}"


def _scores(content: RunContent, times: dict[int, float]) -> bytes:
    """Evaluation scores as scalars, by step."""
    by_tag: dict[str, dict[int, float]] = defaultdict(dict)
    for score in reversed(content.scores):
        if score.score is not None:
            by_tag[f"evaluation/{score.name}/{score.metric}"][score.step] = score.score
    parts = []
    for tag, scores in by_tag.items():
        steps = sorted(scores)
        seconds = np.array([time_of_step(times, step, content.began) for step in steps])
        values = np.array([scores[step] for step in steps], np.float64)
        parts.append(scalar_records(tag, seconds, np.array(steps, np.int64), values))
    return b"".join(parts)


def _texts(content: RunContent, times: dict[int, float]) -> bytes:
    parts = []
    for alert in sorted(content.alerts, key=lambda alert: (alert.onset_step, alert.id)):
        text = (
            f"**{alert.title}** ({alert.severity}, {alert.state}), opened {iso(alert.opened_at)}\n\n"
            f"{alert.message}\n\n{alert.url}"
        )
        second = time_of_step(times, alert.onset_step, content.began)
        parts.append(record(event(second, alert.onset_step, text_value(f"alerts/{alert.kind}", text))))
    return b"".join(parts)

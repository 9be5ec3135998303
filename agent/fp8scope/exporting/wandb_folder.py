"""Weights & Biases: an offline folder, which the package wandb writes and `wandb sync` sends."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from fp8scope.exporting.content import Progress, RunContent, time_of_step

FORBIDDEN = "/\\#?%:"


def write(content: RunContent, folder: Path, project: str, progress: Progress) -> Path:
    """Write the run; returns the folder for `wandb sync`.

    Values are gathered by step, because W&B takes all values of a step at once, in the order of steps.
    """
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    times: dict[int, float] = {}
    for series in content.series(progress):
        seconds = series.seconds(content.began).tolist()
        for step, value, second in zip(series.steps.tolist(), series.values.tolist(), seconds, strict=True):
            rows[step][series.tag] = value
            times[step] = second
    for score in reversed(content.scores):
        if score.score is not None:
            rows[score.step][f"evaluation/{score.name}/{score.metric}"] = score.score
    run = _begin(wandb, content, folder, project)
    for step in sorted(rows):
        second = time_of_step(times, step, content.began)
        run.log({**rows[step], "_timestamp": second}, step=step)
    summary = {"fp8scope/url": content.run.url, "fp8scope/alerts": len(content.alerts)}
    summary["fp8scope/verdict"] = str(content.run.verdict())
    run.summary.update(summary)
    written = Path(run.dir).parent
    run.finish(exit_code=1 if content.run.state == "failed" else 0)
    return written


def _begin(wandb: Any, content: RunContent, folder: Path, project: str) -> Any:
    """Begin an offline run with the id of this one, which captures nothing of this process."""
    run = content.run
    settings = wandb.Settings(
        mode="offline",
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        save_code=False,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
    )
    return wandb.init(
        id=run.id,
        name=run.name,
        group=run.group or None,
        project="".join("_" if char in FORBIDDEN else char for char in project),
        tags=[tag[:64] for tag in run.tags if tag],
        config=content.settings(),
        notes=run.url,
        dir=str(folder),
        settings=settings,
        reinit="finish_previous",
    )

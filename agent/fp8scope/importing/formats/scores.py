"""Results of evaluations: the model's run and step, and items as scores."""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from fp8scope.importing.limits import MAX_ITEMS
from fp8scope.importing.model import SourceEvaluation, ValueTable
from fp8scope.importing.names import MetricNames
from fp8scope.importing.source import ImportSource
from fp8scope.importing.tables import MetricHistory, tables_of
from fp8scope.importing.values import MAX_STEP, number_of

_CHECKPOINT: Final = re.compile(
    r"[/_-]?(?:checkpoint|ckpt|global[_-]?step|step|iter)[_-]?0*(\d{1,18})(?:[/_-]?hf)?/?$", re.I
)
_LOWER_IS_BETTER: Final = re.compile(
    r"perplexity|ppl|nll|loss|bits_per|bpb|\bter\b|\bwer\b|\bcer\b|brier|error", re.I
)
_PRECISIONS: Final = (
    ("fp8", re.compile(r"fp8|float8|e4m3|e5m2", re.I)),
    ("bf16", re.compile(r"bf16|bfloat16", re.I)),
    ("fp16", re.compile(r"fp16|float16|torch\.half", re.I)),
    ("fp32", re.compile(r"fp32|float32", re.I)),
)
_DATE: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d)[-:](\d\d)[-:](\d\d)")


def checkpoint_of(model: str) -> tuple[str, int | None]:
    """Split a model's path into that of its training and the step of the checkpoint, if it names one.

    >>> checkpoint_of("runs/gpt-fp8/checkpoint-2000")
    ('runs/gpt-fp8', 2000)
    """
    match = _CHECKPOINT.search(model[:4_096])
    if match is None:
        return model, None
    step = int(match[1])
    return model[: match.start()] or model, step if step <= MAX_STEP else None


def step_at(source: ImportSource, checkpoint: int | None) -> int:
    """The step of an evaluation: what the person says, else the checkpoint's, else 0."""
    return source.step if source.step is not None else checkpoint or 0


def precision_in(text: str) -> str:
    """The precision that the arguments of a model name; FP8 counts before the dtype of the rest."""
    return next((name for name, pattern in _PRECISIONS if pattern.search(text)), "unknown")


def higher_is_better(metric: str) -> bool:
    """Return whether more of a metric is better, by its name."""
    return _LOWER_IS_BETTER.search(metric) is None


def date_in(path: Path) -> float | None:
    """The time in the name of a results file, in seconds since 1970; taken for UTC."""
    match = _DATE.search(path.name)
    if match is None:
        return None
    try:
        return datetime.fromisoformat(":".join(match.groups())).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def score_table(scores: Mapping[str, float], step: int, names: MetricNames) -> Iterator[ValueTable]:
    """Yield a row with aggregated scores."""
    steps = np.array([step], np.int64)
    metrics = [MetricHistory(name, steps, None, np.array([value])) for name, value in scores.items()]
    yield from tables_of(metrics, names)


def evaluation_of(
    task: str, metric: str, scores: Sequence[tuple[str, float]], *, step: int, higher: bool | None = None
) -> SourceEvaluation | None:
    """Return the scores of a task, given as pairs of an item's id and its score.

    Ids that repeat cannot pair items; then the position does. None if the server takes no such evaluation:
    one without items, with more than MAX_ITEMS, or with a score that is not finite.
    """
    values = [value for _, value in scores]
    if not 1 <= len(values) <= MAX_ITEMS or not np.isfinite(values).all():
        return None
    ids = [item[:128].replace("\0", "") for item, _ in scores]
    return SourceEvaluation(
        name=task[:128].replace("\0", "") or "task",
        metric=metric[:64].replace("\0", "") or "score",
        items=values,
        item_ids=ids if len(set(ids)) == len(ids) else None,
        kind="proportion" if set(values) <= {0.0, 1.0} else "mean",
        step=step,
        higher_is_better=higher_is_better(metric) if higher is None else higher,
    )


def flat_scores(results: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of `{task: {metric: number}}` by `task/metric`; texts such as 'N/A' are left out."""
    scores: dict[str, float] = {}
    for task, metrics in results.items():
        for metric, value in metrics.items() if isinstance(metrics, dict) else ():
            number = number_of(value)
            if number is not None and number == number and metric not in ("alias", "sample_len"):
                scores[f"{task}/{str(metric).removesuffix(',none')}"] = number
    return scores

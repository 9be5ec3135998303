"""Results of lm-evaluation-harness: 0.4 with filters and groups, 0.3 without, and the samples beside them."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from fp8scope.importing.formats.scores import (
    checkpoint_of,
    date_in,
    evaluation_of,
    flat_scores,
    precision_in,
    score_table,
    step_at,
)
from fp8scope.importing.limits import MAX_FILES, MAX_ITEMS
from fp8scope.importing.model import SourceEvaluation, SourceRun, UnreadableError, ValueTable
from fp8scope.importing.names import MetricNames
from fp8scope.importing.source import FileFormat, ImportSource, SourcePath
from fp8scope.importing.values import mapping_of, number_of, read_json, seconds_of

MARKS: Final = ('"versions"', '"n-shot"', '"configs"', '"config"', '"lm_eval_version"', '"group_subtasks"')
SAMPLE_KEYS: Final = frozenset(
    ("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "doc_hash")
    + ("prompt_hash", "target_hash")
)
_MODEL: Final = re.compile(r"(?:^|,)\s*(?:peft|delta|pretrained|model|path|engine)=([^,]+)")
MAX_METRICS_OF_A_TASK: Final = 64


def matches(candidate: SourcePath) -> bool:
    """A JSON object that begins with the results of tasks, or has them and what else the harness writes."""
    text = candidate.text.lstrip()
    if not text.startswith("{") or '"results"' not in text or '"config_general"' in text:
        return False
    return re.match(r'\{\s*"results"\s*:\s*\{', text) is not None or sum(mark in text for mark in MARKS) >= 2


def read(source: ImportSource) -> Iterator[SourceRun]:
    """Yield the run of the model that was evaluated."""
    document = read_json(source.path)
    results = document.get("results") if isinstance(document, dict) else None
    if not isinstance(results, dict):
        raise UnreadableError(f"{source.path} has no results of lm-evaluation-harness")
    source.total = source.path.stat().st_size
    source.done = source.total
    config = mapping_of(document.get("config"))
    arguments = config.get("model_args")
    model = _model_of(document, arguments, source.path)
    training, checkpoint = checkpoint_of(model)
    notes: list[str] = []
    yield SourceRun(
        key=json.dumps(
            [source.identity(source.path.parent.parent), training, _without_model(arguments, model)]
        ),
        name=Path(training).name or training,
        parts=_parts(source, document, step_at(source, checkpoint), notes),
        config={
            "lm_eval": {
                name: document.get(name) for name in ("config", "n-shot", "versions") if name in document
            }
        },
        environment={
            name: document[name]
            for name in ("lm_eval_version", "transformers_version", "git_hash", "model_source")
            if isinstance(document.get(name), str)
        },
        precision=precision_in(f"{model} {arguments} {config.get('model_dtype', '')}"),
        created_at=seconds_of(document.get("date")) or date_in(source.path),
        notes=notes,
    )


def _model_of(document: Mapping[str, Any], arguments: Any, path: Path) -> str:
    if isinstance(name := document.get("model_name"), str) and name:
        return name
    if isinstance(arguments, str) and (match := _MODEL.search(arguments[:10_000])):
        return match[1].strip()
    if isinstance(arguments, dict):
        for key in ("peft", "delta", "pretrained", "model", "path", "engine"):
            if isinstance(value := arguments.get(key), str):
                return value
    return path.resolve().parent.name or path.stem


def _without_model(arguments: Any, model: str) -> str:
    """The arguments that tell two evaluations of a model apart, such as its dtype."""
    return json.dumps(arguments, sort_keys=True, default=str).replace(model, "")[:10_000]


def _parts(
    source: ImportSource, document: Mapping[str, Any], step: int, notes: list[str]
) -> Iterator[ValueTable | SourceEvaluation]:
    results = {**mapping_of(document.get("groups")), **mapping_of(document.get("results"))}
    better = mapping_of(document.get("higher_is_better"))
    files = _sample_files(source.path)
    for task, path in files:
        yield from _evaluations(source, path, task, mapping_of(better.get(task)), step, notes)
    names = MetricNames(source.loss)
    yield from score_table(flat_scores(results), step, names)
    notes += names.notes()
    if not files:
        notes.append(
            "There are no samples: scores have no interval and no verdict. Run lm-eval with --log_samples."
        )


def _sample_files(path: Path) -> list[tuple[str, Path]]:
    """The samples that were written with the results: those with the same time in their name."""
    moment = path.stem.partition("_")[2]
    if not moment:
        return []
    suffix = f"_{moment}.jsonl"
    beside = zip(range(MAX_FILES), sorted(path.parent.iterdir()), strict=False)
    return [
        (file.name.removeprefix("samples_").removesuffix(suffix), file)
        for _, file in beside
        if file.name.startswith("samples_") and file.name.endswith(suffix) and file.is_file()
    ]


def _evaluations(
    source: ImportSource, path: Path, task: str, better: Mapping[str, Any], step: int, notes: list[str]
) -> Iterator[SourceEvaluation]:
    """Yield an evaluation for each metric and filter of a task."""
    scores: dict[str, list[tuple[str, float]]] = {}
    left_out: set[str] = set()
    source.total += path.stat().st_size
    for line in source.lines(path):
        sample = _sample_in(line)
        if sample is None:
            left_out.add("lines that are no samples")
            continue
        filter_name = str(sample.get("filter", "none"))[:64]
        identity = f"{sample.get('doc_id', '')}-{str(sample.get('doc_hash', ''))[:16]}"
        for metric in _metrics_of(sample):
            value = number_of(sample.get(metric))
            label = metric if filter_name == "none" else f"{metric},{filter_name}"
            if value is None:
                left_out.add(f"{label}, whose items are no numbers")
            elif label in scores or len(scores) < MAX_METRICS_OF_A_TASK:
                scores.setdefault(label, []).append((identity, value))
    for label, items in sorted(scores.items()):
        given = better.get(label.partition(",")[0])
        evaluation = evaluation_of(
            task, label, items, step=step, higher=given if isinstance(given, bool) else None
        )
        if evaluation is None:
            left_out.add(f"{label}, which has more than {MAX_ITEMS:,} items or one that is not finite")
        else:
            yield evaluation
    if left_out:
        notes.append(f"Of {task} were left out: {'; '.join(sorted(left_out)[:5])[:400]}.")


def _sample_in(line: bytes) -> dict[str, Any] | None:
    try:
        sample = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return sample if isinstance(sample, dict) else None


def _metrics_of(sample: Mapping[str, Any]) -> list[str]:
    """The names of a sample's metrics; early versions do not list them."""
    listed = sample.get("metrics")
    if isinstance(listed, list):
        return [name for name in listed[:MAX_METRICS_OF_A_TASK] if isinstance(name, str)]
    return [name for name in list(sample)[:100] if name not in SAMPLE_KEYS]


FORMAT = FileFormat(name="lm-eval", title="lm-evaluation-harness", matches=matches, read=read)

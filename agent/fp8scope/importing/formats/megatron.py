"""Logs of Megatron-LM: what it prints each interval, its evaluations, and its arguments."""

import re
from collections.abc import Iterator
from typing import Final

from fp8scope.importing.limits import MAX_ENTRIES
from fp8scope.importing.model import SourceRun, ValueTable
from fp8scope.importing.names import MetricNames
from fp8scope.importing.source import FileFormat, ImportSource, SourcePath
from fp8scope.importing.tables import RowTables
from fp8scope.importing.values import MAX_STEP, from_text, micros_of, number_in

_ITERATION: Final = re.compile(
    r"^(?P<head>[^|]{0,200}?)iteration\s+(?P<step>\d{1,18})\s*/\s*(?P<total>\d{1,18})\s*\|(?P<rest>.*)$"
)
_EVALUATION: Final = re.compile(
    r"(?P<what>validation|test|evaluation) loss at iteration\s+(?P<step>\d{1,18})"
    r"(?P<where>[^|]{0,200})\|(?P<rest>.*)$"
)
_TIME: Final = re.compile(r"\[?(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d{1,6})?)\]?")
_ARGUMENT: Final = re.compile(
    r"^\s*(?:\[?\w*\d+\]?:\s*)?(?P<name>\w{1,100}) \.{3,}\s*(?P<value>.{0,4000}?)\s*$"
)
RENAMED: Final = {
    "lm loss": ("lm_loss", 1.0),
    "learning rate": ("learning_rate", 1.0),
    "grad norm": ("grad_norm", 1.0),
    "elapsed time per iteration (ms)": ("step_seconds", 1e-3),
    "loss scale": ("loss_scale", 1.0),
}
"""Names of the log, and what they are here, with a factor."""


def matches(candidate: SourcePath) -> bool:
    """A line of an iteration, or the list of arguments."""
    text = candidate.text
    if "arguments ---" in text and " ....." in text:
        return True
    return any(_ITERATION.match(line) and "consumed samples" in line for line in text.splitlines())


def read(source: ImportSource) -> Iterator[SourceRun]:
    """Yield the run of the log."""
    source.total = source.path.stat().st_size
    run = SourceRun(
        key=source.file_key(source.path),
        name=source.path.stem,
        parts=iter(()),
        environment={"file": source.path.name},
    )
    lines = (line.decode("utf-8", "replace") for line in source.lines())
    first = _read_arguments(run, lines)
    run.parts = _parts(source, run, first, lines)
    yield run


def _read_arguments(run: SourceRun, lines: Iterator[str]) -> str:
    """Read the arguments, up to the first line of an iteration, which is returned; empty at the end."""
    for line in lines:
        if _ITERATION.match(line) or _EVALUATION.search(line):
            _describe(run)
            return line
        match = _ARGUMENT.match(line)
        if match is not None and len(run.config) < MAX_ENTRIES:
            run.config[match["name"]] = from_text(match["value"])
    _describe(run)
    return ""


def _describe(run: SourceRun) -> None:
    config = run.config
    if config.get("fp8") not in (None, False) or config.get("fp8_format") not in (None, False):
        run.precision = "fp8"
    elif config.get("bf16") is True:
        run.precision = "bf16"
    elif config.get("fp16") is True:
        run.precision = "fp16"
    seed, total = config.get("seed"), config.get("train_iters")
    run.seed = seed if type(seed) is int and abs(seed) < 2**63 else None
    run.total_steps = total if type(total) is int and 0 < total <= MAX_STEP else None


def _parts(source: ImportSource, run: SourceRun, first: str, lines: Iterator[str]) -> Iterator[ValueTable]:
    names = MetricNames(source.loss)
    rows, last_step, time_us = RowTables(names), -1, None
    length = run.config.get("seq_length")
    for line in _chained(first, lines):
        match, is_step = _ITERATION.match(line), True
        if match is None:
            match, is_step = _EVALUATION.search(line), False
        if match is None or (step := int(match["step"])) > MAX_STEP:
            continue
        values = dict(_numbers(match["rest"]))
        if is_step:
            time_us = _time_in(match["head"]) or time_us
            if step <= last_step:
                # The training went on from an earlier checkpoint: its next start.
                yield from rows.take()
                rows = RowTables(names, attempt=rows.attempt + 1)
            last_step = step
            run.total_steps = run.total_steps or int(match["total"]) or None
            if isinstance(length, int) and "consumed samples" in values:
                values["tokens"] = values["consumed samples"] * length
            renamed = ((RENAMED.get(name, (name, 1.0)), value) for name, value in values.items())
            rows.add(step, time_us, [(name, value * factor) for (name, factor), value in renamed])
        else:
            prefix = " ".join((match["what"], _place_in(match["where"]))).strip()
            rows.add(step, time_us, [(f"{prefix}/{name}", value) for name, value in values.items()])
        if rows.is_full:
            yield from rows.take()
    yield from rows.take()
    run.notes += names.notes()


def _chained(first: str, lines: Iterator[str]) -> Iterator[str]:
    if first:
        yield first
    yield from lines


def _numbers(text: str) -> Iterator[tuple[str, float]]:
    """The entries `name: number` between bars."""
    for entry in text.split("|"):
        name, colon, value = entry.rpartition(":")
        number = number_in(value.strip()) if colon else None
        name = name.strip()
        if number is not None and name:
            yield name.removesuffix(" value"), number


def _place_in(text: str) -> str:
    """The set that was evaluated, of ` on validation set`; empty for the usual one."""
    match = re.fullmatch(r"\s*on (\w{1,40}) set\s*", text)
    return match[1] if match and match[1] not in ("validation", "test") else ""


def _time_in(text: str) -> int | None:
    match = _TIME.search(text)
    return None if match is None else micros_of(match[1])


FORMAT = FileFormat(name="megatron", title="Megatron-LM log", matches=matches, read=read)

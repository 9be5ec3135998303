"""The scalars that a data point is stored as.

A gauge is its value. A sum is its total: what arrives as differences (delta) is added up. A histogram, also
an exponential one, is the number and the sum of its observations so far, and the mean of those since the last
export: a mean over the whole run would hide what changes.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, DataPointFlags, Metric

from fp8scope_dashboard.otlp_metrics.resources import RANK
from fp8scope_dashboard.wire.standard_names import meaning_of

STEP: Final = (
    *("step", "global_step", "fp8scope.step", "train.step", "training.step", "train/global_step"),
    *("trainer/global_step", "iteration", "train.iteration", "training.iteration", "dl.iteration"),
    "megatron.iteration",
)
"""Attributes of a data point that have its step, and metrics that are the step of what comes with them."""
MAX_SCALAR: Final = 128
MAX_LABELS: Final = 16
_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9_./-]")
_DELTA: Final = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
_NO_VALUE: Final = DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK

SeriesState = list[float]
"""Of a series: the start of its sums in nanoseconds, their number of observations, and their sum."""


@dataclass(slots=True, kw_only=True)
class DataPoint:
    """A data point of any kind, with the attributes that name its series.

    Attributes:
        series: the name of its scalar.
        meaning: the scalar whose meaning the metric has, or "".
        kind: gauge, sum, histogram or summary.
        values: the value, or count and sum, by name.
        start, time: in nanoseconds since 1970.
        is_delta: whether sums are those since the last export.
    """

    series: str
    meaning: str
    kind: str
    values: Mapping[str, float]
    start: int
    time: int
    is_delta: bool
    step: int | None
    rank: int | None


def value_of(value: AnyValue) -> Any:
    """An attribute's value as one of JSON; lists and maps as text."""
    kind = value.WhichOneof("value")
    if kind == "int_value":
        return value.int_value
    if kind in ("string_value", "bool_value"):
        return getattr(value, kind)
    if kind == "double_value":
        return value.double_value if math.isfinite(value.double_value) else str(value.double_value)
    if kind == "array_value":
        return ", ".join(str(value_of(entry)) for entry in list(value.array_value.values)[:100])
    return None if kind is None else f"({kind})"


def attributes_of(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    """Attributes as a dictionary."""
    return {pair.key: value_of(pair.value) for pair in pairs}


def points_of(metric: Metric) -> Iterator[DataPoint | str]:
    """The data points of a metric; a text instead of one that cannot be stored, which says why."""
    kind = metric.WhichOneof("data")
    if kind is None:
        return
    data = getattr(metric, kind)
    temporality = getattr(data, "aggregation_temporality", 0)
    for point in data.data_points:
        if point.flags & _NO_VALUE:
            continue
        values = _values(kind, point)
        if values is None:
            yield f"{metric.name[:80]}: a data point has no value."
            continue
        yield _point(metric.name, kind, values, point, is_delta=temporality == _DELTA)


def _values(kind: str, point: Any) -> dict[str, float] | None:
    if kind in ("gauge", "sum"):
        number = point.WhichOneof("value")
        return None if number is None else {"": float(getattr(point, number))}
    values = {"count": float(point.count)}
    if kind == "summary":
        quantiles = {f"q{entry.quantile:g}": entry.value for entry in list(point.quantile_values)[:20]}
        return {**values, "sum": point.sum, **quantiles}
    if point.HasField("sum"):
        values["sum"] = point.sum
    for name in ("min", "max"):
        if point.HasField(name):
            values[name] = getattr(point, name)
    return values


def _point(name: str, kind: str, values: dict[str, float], point: Any, *, is_delta: bool) -> DataPoint:
    attributes = attributes_of(point.attributes)
    step, rank = _number(attributes, STEP), _number(attributes, RANK)
    return DataPoint(
        series=series_name(name, attributes) if attributes else plain_series_name(name),
        meaning="" if attributes else meaning_of(name),
        kind="histogram" if kind == "exponential_histogram" else kind,
        values=values,
        start=point.start_time_unix_nano,
        time=point.time_unix_nano,
        is_delta=is_delta,
        step=step,
        rank=rank,
    )


def _number(attributes: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """Take the first of these attributes out, if it is a number from 0 on."""
    for name in names if attributes else ():
        value = attributes.get(name)
        if value is None:
            continue
        if isinstance(value, str) and value.isdecimal() and len(value) < 19:
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            del attributes[name]
            return value
    return None


@lru_cache(maxsize=10_000)
def plain_series_name(metric: str) -> str:
    """The name of a series without attributes."""
    return series_name(metric, {})


def series_name(metric: str, attributes: Mapping[str, Any]) -> str:
    """The name of a series: the metric, and each attribute with its value in the order of their names."""
    labels = [f"{name}_{attributes[name]}" for name in sorted(attributes)[:MAX_LABELS]]
    whole = "/".join((metric, *labels))
    name = _NOT_IN_A_NAME.sub("_", whole)
    # Room for the parts of a histogram.
    if name == whole and 0 < len(name) <= MAX_SCALAR - 16:
        return name
    return f"{name[: MAX_SCALAR - 25]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def scalars_of(point: DataPoint, states: dict[str, SeriesState]) -> dict[str, float]:
    """The scalars of a data point; `states` has those of its series, and is brought up to date."""
    if point.kind == "gauge":
        return {point.series: point.values[""]}
    if point.kind == "sum":
        if not point.is_delta:
            return {point.series: point.values[""]}
        _, _, before = states.get(point.series, (0, 0, 0.0))
        total = before + point.values[""]
        states[point.series] = [0, 0, total]
        return {point.series: total}
    if point.kind == "summary":
        return {f"{point.series}/{name}": value for name, value in point.values.items()}
    return _histogram(point, states)


def _histogram(point: DataPoint, states: dict[str, SeriesState]) -> dict[str, float]:
    start, count, total = states.get(point.series, (0, 0.0, 0.0))
    new_count, new_sum = point.values["count"], point.values.get("sum", math.nan)
    scalars: dict[str, float] = {}
    if point.is_delta:
        count, total = count + new_count, total + new_sum
        states[point.series] = [0, count, total]
        scalars = {
            f"{point.series}/{name}": point.values[name] for name in ("min", "max") if name in point.values
        }
    else:
        # A process that began again counts from 0; then everything is new.
        began_again = start != float(point.start) or new_count < count
        states[point.series] = [float(point.start), new_count, new_sum]
        before = (0.0, 0.0) if began_again else (count, total)
        count, total = new_count, new_sum
        new_count, new_sum = new_count - before[0], new_sum - before[1]
    scalars |= {f"{point.series}/count": count}
    if not math.isnan(total):
        scalars[f"{point.series}/sum"] = total
    if new_count > 0 and not math.isnan(new_sum):
        scalars[f"{point.series}/mean"] = new_sum / new_count
    return scalars

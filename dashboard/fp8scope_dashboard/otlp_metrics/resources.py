"""The run, the rank and the description that the attributes of a resource name.

The names are those of NeMo Lens (`nv.dl.rank`, and `dl.rank` in its version 0.1), which NeMo and Megatron-LM
use, those of torchrun's variables in small letters, and our own. docs/otlp.md lists them.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

RUN_ID: Final = (
    *("fp8scope.run.id", "nv.dl.run.uuid", "nemo.run.id", "run.id", "run_id", "slurm.job.id", "k8s.job.uid"),
)
RUN_NAME: Final = ("fp8scope.run.name", "nemo.run.name", "run.name", "run_name", "slurm.job.name")
RANK: Final = ("nv.dl.rank", "dl.rank", "rank", "global_rank")
WORLD_SIZE: Final = ("nv.dl.world_size", "dl.world_size", "world_size")
RESTARTS: Final = ("fp8scope.attempt", "slurm.torchelastic.restart_count", "slurm.restart_count")
"""Numbers of earlier starts of the training."""
HOST: Final = ("host.name", "k8s.pod.name", "host.id")
CLIENT: Final = "otlp"
"""The client in the environment of a run that an exporter has begun."""
OWN: Final = "fp8scope."
PRECISIONS: Final = ("bf16", "fp8", "fp16", "fp32")
ENVIRONMENT: Final = (
    *("host.", "process.", "os.", "telemetry.", "k8s.", "service.", "container.", "cloud.", "deployment."),
    *("slurm.", "nv.gpu."),
)
"""Beginnings of attributes that describe the process. The others are the configuration."""
MAX_RANK: Final = 2**31 - 1
MAX_ATTRIBUTES: Final = 500
MAX_VALUE: Final = 4_000
MAX_NAME: Final = 200
_RANK_SUFFIX: Final = re.compile(r"[-_.]?rank[-_.]?\d+$")
_OF_RANK: Final = re.compile(r"(?:^|[._])(?:local_|global_)?rank$")


@dataclass(frozen=True, kw_only=True)
class ExportingProcess:
    """The process that a resource describes.

    Attributes:
        run: the id of the run, the same for all of its ranks.
        rank, attempt: None if no attribute says it.
        fields: what the run is registered with.
        warnings: attributes that cannot be used.
    """

    run: uuid.UUID
    rank: int | None
    attempt: int | None
    hostname: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def process_of(project: int, attributes: Mapping[str, Any]) -> ExportingProcess:
    """Read the attributes of a resource."""
    warnings: list[str] = []
    key = _key(attributes)
    return ExportingProcess(
        run=_run_id(project, key, attributes),
        rank=whole(attributes, RANK, warnings),
        attempt=whole(attributes, RESTARTS, warnings),
        hostname=str(first(attributes, HOST) or "")[:255],
        fields=_fields(attributes, warnings),
        warnings=tuple(warnings),
    )


def first(attributes: Mapping[str, Any], names: Iterable[str]) -> Any:
    """The value of the first of these attributes that is there and not empty; None if none is."""
    return next((attributes[name] for name in names if attributes.get(name) not in (None, "")), None)


def whole(attributes: Mapping[str, Any], names: Iterable[str], warnings: list[str]) -> int | None:
    """A number from 0 on; None, and a warning, if it is none. OTEL_RESOURCE_ATTRIBUTES has texts only."""
    value = first(attributes, names)
    if value is None:
        return None
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 19 else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_RANK:
        warnings.append(f"{next(iter(names))} is {str(value)[:40]!r}, and no number from 0 on.")
        return None
    return number


def _key(attributes: Mapping[str, Any]) -> str:
    """A text that tells the run from others: its id, or that of the process without its rank."""
    named = first(attributes, RUN_ID)
    if named is not None:
        return f"id {str(named)[:MAX_VALUE]}"
    service = f"{attributes.get('service.namespace', '')}/{attributes.get('service.name', '')}"
    instance = str(attributes.get("service.instance.id", ""))[:MAX_VALUE]
    if instance:
        return f"instance {service} {_RANK_SUFFIX.sub('', instance)}"
    return f"process {service} {attributes.get('host.name', '')} {attributes.get('process.pid', '')}"[
        :MAX_VALUE
    ]


def _run_id(project: int, key: str, attributes: Mapping[str, Any]) -> uuid.UUID:
    try:
        # The id of a run of the agent, which then has the values, too.
        return uuid.UUID(str(attributes["fp8scope.run.id"]))
    except (KeyError, ValueError):
        return uuid.uuid5(uuid.NAMESPACE_URL, f"fp8scope/otlp/{project}/{key}")


def _fields(attributes: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    environment: dict[str, Any] = {"client": CLIENT}
    config: dict[str, Any] = {}
    for name, value in list(attributes.items())[:MAX_ATTRIBUTES]:
        if name.startswith(OWN) or _OF_RANK.search(name) or not _is_short(value):
            continue
        (environment if name.startswith(ENVIRONMENT) else config)[name] = value
    if (size := whole(attributes, WORLD_SIZE, warnings)) is not None:
        environment["world_size"] = size
    return {
        "name": _name(attributes),
        "environment": environment,
        "config": {
            name: value for name, value in config.items() if name not in (*RUN_ID, *RUN_NAME, *WORLD_SIZE)
        },
        **_own_fields(attributes, warnings),
    }


def _is_short(value: Any) -> bool:
    return len(str(value)) <= MAX_VALUE and "\0" not in str(value)


def _name(attributes: Mapping[str, Any]) -> str:
    named, service = first(attributes, RUN_NAME), str(attributes.get("service.name") or "")
    run = str(first(attributes, RUN_ID) or "")
    service = service if service and not service.startswith("unknown_service") else "otlp"
    name = str(named) if named is not None else f"{service} {run[:12]}".strip()
    return name.replace("\0", "")[:MAX_NAME] or "otlp"


def _own_fields(attributes: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    """The fields that say what the run is compared with, as the tags of MLflow's clients."""
    fields: dict[str, Any] = {}
    for name in ("group", "baseline"):
        if (value := first(attributes, (OWN + name,))) is not None:
            fields[name] = str(value).replace("\0", "")[:128]
    for name in ("seed", "total_steps"):
        if (number := whole(attributes, (OWN + name,), warnings)) is not None:
            fields[name] = number
    precision = first(attributes, (OWN + "precision",))
    if precision in PRECISIONS:
        fields["precision"] = precision
    elif precision is not None:
        warnings.append(f"fp8scope.precision is {str(precision)[:40]!r}, and not {', '.join(PRECISIONS)}.")
    return fields

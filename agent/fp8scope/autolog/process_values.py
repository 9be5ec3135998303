"""Sets apart the entries of a configuration that belong to one process or one start, not to the training.

Ranks, times of the start and folders of the output differ between runs that are seeds of each other. They are
kept under the entry `job`, which the server leaves out when it compares configurations.
"""

import re
import time
from collections.abc import Mapping
from typing import Any

JOB = "job"
_NAMES = frozenset(
    [
        "rank",
        "localrank",
        "globalrank",
        "noderank",
        "processindex",
        "localprocessindex",
        "processid",
        "pid",
        "hostname",
        "masteraddr",
        "masterport",
        "timestamp",
        "starttime",
        "startedat",
        "runname",
        "outputdir",
        "outdir",
        "savedir",
        "savepath",
        "logdir",
        "logpath",
        "loggingdir",
        "rundir",
        "checkpointdir",
        "ckptdir",
        "resultsdir",
        "workdir",
    ]
)
"""In lower case and without punctuation."""
_DATE = re.compile(r"(?<!\d)20\d\d-?[01]\d-?[0-3]\d[T _-]?[0-2]\d[:_h-]?[0-5]\d")
_NUMBER = re.compile(r"(?<!\d)\d{10}(?!\d)")
RECENT_SECONDS = 2 * 86400.0
"""A number that is a time since 1970 this close to now is a time of the start."""


def set_apart(config: Mapping[str, Any], now: float | None = None) -> dict[str, Any]:
    """Return the configuration with such entries under `job`, by their dotted names."""
    apart: dict[str, Any] = {}
    rest = _without(config, "", apart, time.time() if now is None else now)
    if apart:
        job = rest.get(JOB)
        name = JOB if job is None or isinstance(job, Mapping) else f"{JOB}_"
        rest[name] = {**(job if isinstance(job, Mapping) else {}), **apart}
    return rest


def _without(config: Mapping[str, Any], prefix: str, apart: dict[str, Any], now: float) -> dict[str, Any]:
    rest: dict[str, Any] = {}
    for name, value in config.items():
        full = f"{prefix}{name}"
        if isinstance(value, Mapping):
            rest[name] = _without(value, f"{full}.", apart, now)
        elif _is_of_one_process(str(name), value, now):
            apart[full] = value
        else:
            rest[name] = value
    return rest


def _is_of_one_process(name: str, value: Any, now: float) -> bool:
    if re.sub(r"[\W_]", "", name).lower() in _NAMES:
        return True
    if isinstance(value, bool) or "seed" in name.lower():
        return False
    if isinstance(value, int | float):
        return abs(value - now) < RECENT_SECONDS
    if not isinstance(value, str):
        return False
    numbers = (float(text) for text in _NUMBER.findall(value))
    return bool(_DATE.search(value)) or any(abs(number - now) < RECENT_SECONDS for number in numbers)

"""Checks of the public API's arguments. Errors name the argument and say what is accepted."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from fp8scope.config import ArgumentTypeError, ConfigurationError
from fp8scope.metadata.redaction import plain

_TEXTS = ("project", "name", "group", "baseline", "relation", "precision", "url", "token", "mode", "console")

_SEEDS = ("seed", "random_seed", "manual_seed", "global_seed")


def check_init(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if an argument of `fp8scope.init` has the wrong type."""
    for name in _TEXTS:
        value = arguments[name]
        # None is what argparse gives for an option that was left out.
        if value is not None and not isinstance(value, str):
            raise _wrong(name, "a string", value)
    config, directory = arguments["config"], arguments["directory"]
    if config is not None and not isinstance(config, Mapping):
        raise _wrong("config", "a mapping of names to values (for a namespace, vars(args))", config)
    if directory is not None and not isinstance(directory, str | os.PathLike):
        raise _wrong("directory", "a path", directory)
    if arguments["tags"] is not None:
        _check_texts("tags", arguments["tags"])
    if arguments["commands"] is not None:
        _check_texts("commands", arguments["commands"])
    resume = arguments["resume"]
    if resume is not None and not isinstance(resume, str | Mapping):
        raise _wrong("resume", 'a run\'s id, its state_dict() or "auto"', resume)
    parent = arguments["parent"]
    if parent is not None and not isinstance(parent, str | Mapping):
        raise _wrong("parent", "a run's id or its state_dict()", parent)
    if not isinstance(arguments["data_hash"], bool):
        raise _wrong("data_hash", "True or False", arguments["data_hash"])
    check_shadow(arguments["shadow"])


def parent_id(parent: str | Mapping[str, Any] | None) -> str:
    """The id that `parent` names, as it is; empty for None. Raises ConfigurationError for another state."""
    if not isinstance(parent, Mapping):
        return parent or ""
    if not isinstance(parent.get("run"), str):
        raise ConfigurationError("parent is not a state that run.state_dict() returned.")
    return str(parent["run"])


def plain_config(config: Mapping[str, Any]) -> Any:
    """Convert a configuration to JSON values. Raises ConfigurationError if a value cannot be read."""
    try:
        return plain(dict(config))
    except Exception as error:
        raise ConfigurationError(f"config cannot be read ({type(error).__name__}: {error}).") from error


def seed_in(config: Mapping[str, Any]) -> int | None:
    """The seed that a configuration names at its top level; None without one, or if two of them differ.

    Runs are paired with their baseline by seed. `config` is the result of `plain_config`.
    """
    values = {value for name, value in config.items() if name.casefold() in _SEEDS and type(value) is int}
    seed = values.pop() if len(values) == 1 else None
    return seed if seed is not None and -(2**63) <= seed < 2**63 else None


def check_watch(
    every: object, shadow: object, include: object, scaler: object, readiness: object = False
) -> None:
    """Raise ConfigurationError if an argument of `Run.watch` is invalid."""
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 0):
        raise ConfigurationError(f"every must be a whole number of steps, or 0 for never, got {every!r}.")
    check_shadow(shadow)
    if include is not None and not callable(include):
        _check_texts("include", include)
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise _wrong("scaler", "a GradScaler", scaler)
    if not isinstance(readiness, bool):
        raise _wrong("readiness", "True or False", readiness)


def check_shadow(shadow: object) -> None:
    """Raise ConfigurationError unless `shadow` is a recipe or None."""
    if shadow is not None and (isinstance(shadow, type) or not hasattr(shadow, "format_of")):
        raise _wrong("shadow", "a recipe, such as DelayedScaling()", shadow)


def seconds(value: object) -> float:
    """Return a timeout as a float. Raises ConfigurationError unless it is a number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value < 0:
        raise ConfigurationError(f"timeout must be a number of seconds, got {value!r}.")
    return float(value)


def _check_texts(name: str, values: object) -> None:
    if isinstance(values, str):
        return
    # Arrays and tensors are iterable too, but are always a mistake here.
    if not isinstance(values, Sequence | Set | Iterator) or isinstance(values, bytes):
        raise _wrong(name, "a sequence of strings", values)


def _wrong(name: str, wanted: str, value: object) -> ArgumentTypeError:
    shown = f"a {type(value).__name__}" if name == "token" else repr(value)[:200]
    return ArgumentTypeError(f"{name} must be {wanted}, got {shown}.")

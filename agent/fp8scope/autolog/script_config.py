"""Reads the configuration of an unmodified script, for `fp8scope run`, when the training begins.

The sources, the most explicit first: parsed command-line arguments (argparse, click), configurations of
OmegaConf and Hydra, the script's configuration objects, and its module-level constants. They are merged by
name. If two sources differ, the more explicit one wins, and the other value is kept under the name of its
source. Reading imports nothing and reads no tensor.

A module-level name is a constant unless a loop of its file binds it, a function binds it through `global`, or
it is imported from a library.
"""

import argparse
import dataclasses
import enum
import json
import logging
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

from fp8scope.autolog.frame_locals import locals_of
from fp8scope.autolog.parsed_arguments import is_script_file
from fp8scope.autolog.process_values import set_apart
from fp8scope.autolog.rebound_names import rebound_names
from fp8scope.guard import before_any_run
from fp8scope.metadata.redaction import conceal, is_secret_entry, plain

MAX_BYTES = 256 << 10
"""The maximum size of the configuration as JSON. Beyond it the least explicit entries are left out."""
MAX_LEAVES = 2000
"""The maximum number of plain values in one object."""
MAX_DEPTH = 6
MAX_CONSTANTS = 500
MAX_TEXT = 500
"""Longer strings at module level are taken for data, not settings."""
MAX_SEQUENCE = 64
MAX_FRAMES = 100

_WORD = r"(?:args?|arguments|cfg|conf|config|configs|configuration|flags|hparams?|hp|hps|hyperparams|"
_WORD += r"hyper_?parameters|opts?|options|params|settings)"
_GENERIC_NAME = re.compile(rf"(?i){_WORD}")
_CONFIG_NAME = re.compile(rf"(?i)(?:.*_)?{_WORD}")
_CONFIG_CLASS = re.compile(
    r"(?:.*[a-z0-9_])?(?:Args|Arguments|Cfg|Config|HParams|Hyperparameters|Options|Settings)"
)
logger = logging.getLogger("fp8scope")


class NotPlainError(Exception):
    """Raised for an object that holds anything but plain values, or too many of them."""


class _PlainValueReader:
    """Converts one object to plain values. `strict`: raise on other values instead of naming their type."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._left = MAX_LEAVES

    def read(self, value: Any, name: str) -> Any:
        """Return the plain form of `value`. `name` describes it in error counts.

        Raises:
            NotPlainError: the value has no plain form, or reading it failed.
        """
        try:
            return self._read(value, 0)
        except NotPlainError:
            raise
        except Exception as error:  # raised by the script's own objects, such as a property
            before_any_run(f"reading {name}", error)
            raise NotPlainError(f"{name} cannot be read") from error

    def _read(self, value: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise NotPlainError(f"nested deeper than {MAX_DEPTH}")
        if (items := _items(value)) is not None:
            if self._strict and any(not isinstance(key, str) for key, _ in items):
                raise NotPlainError("keys that are not strings")
            return {str(key): self._read(item, depth + 1) for key, item in items}
        if type(value) in (set, frozenset):
            return [self._read(item, depth + 1) for item in sorted(value, key=str)]
        if type(value) in (list, tuple):
            return [self._read(item, depth + 1) for item in value]
        self._left -= 1
        if self._left < 0:
            raise NotPlainError(f"more than {MAX_LEAVES} values")
        return self._leaf(value)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return value.value if isinstance(value, int | str) else value.name
        if value is None or isinstance(value, bool | int | float | str):
            return value
        kind = type(value)
        library = kind.__module__.partition(".")[0]
        if isinstance(value, PurePath) or (library == "torch" and kind.__name__ in ("dtype", "device")):
            return str(value)
        if library == "numpy" and kind.__name__ != "ndarray" and hasattr(value, "item"):
            return self._leaf(value.item())
        if self._strict:
            raise NotPlainError("more than plain values")
        # Not str(value): for a tensor that waits for its device, and for a model it is long.
        return getattr(value, "__qualname__", None) or f"<{kind.__qualname__}>"


def _items(value: Any) -> "list[tuple[Any, Any]] | None":
    """Return the entries of a mapping, dataclass or object of a script's class; None for other values."""
    if isinstance(value, argparse.Namespace | SimpleNamespace):
        return list(vars(value).items())
    if isinstance(value, Mapping):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    if (
        isinstance(value, type | enum.Enum)
        or not _is_of_script(type(value))
        or not hasattr(value, "__dict__")
    ):
        return None
    return [(name, item) for name, item in vars(value).items() if not name.startswith("_")]


def _is_of_script(kind: type) -> bool:
    """Return whether a class is defined by the script. Attributes of library classes are not settings."""
    module = sys.modules.get(kind.__module__)
    return is_script_file(str(getattr(module, "__file__", None) or "<unknown>"))


def collect(namespaces: Sequence[argparse.Namespace], trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the script's configuration. Call it where the training begins: it reads the callers' frames.

    `namespaces` are argparse's results. `trainer` is the configuration of a trainer or model; it comes first
    and is not changed. Strings under names of secrets are hidden, also in the recorded command line.
    """
    main = vars(sys.modules["__main__"])
    scopes = [locals_of(frame) for frame in _script_frames(sys._getframe(1))]
    objects = dict(_objects(main, scopes, {id(parsed) for parsed in namespaces}))
    sources: list[tuple[str, Mapping[str, Any]]] = []
    for namespace in reversed(namespaces):
        sources.append(("arguments", _declared(namespace)))
    sources += [("click", source) for source in _click()]
    sources += [("omegaconf", source) for source in _omegaconf([main, *scopes])]
    generic = {name: values for name, values in objects.items() if _GENERIC_NAME.fullmatch(name)}
    sources += generic.items()
    sources.append(("objects", {name: values for name, values in objects.items() if name not in generic}))
    sources += list(_config_modules(main))
    sources.append(("constants", _constants(main, generic.values())))
    merged = _merged(trainer, sources)
    conceal(secrets_in(merged))
    return set_apart(_bounded(merged))


def parsed_by_callers() -> dict[str, Any]:
    """Return the results of argparse that the running functions of the script, or `__main__`, hold.

    For `fp8scope.attach`, which comes after the parsing and must not take other values for settings.
    """
    scopes = [locals_of(frame) for frame in _script_frames(sys._getframe(1))]
    scopes.append(vars(sys.modules["__main__"]))
    namespaces = {
        id(value): value
        for scope in scopes
        for value in list(scope.values())
        if isinstance(value, argparse.Namespace)
    }
    merged = _merged({}, (("arguments", _declared(namespace)) for namespace in namespaces.values()))
    conceal(secrets_in(merged))
    return set_apart(_bounded(merged))


def _merged(trainer: Mapping[str, Any], sources: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Merge by name. The first value wins; a different one is kept under the name of its source."""
    merged = dict(trainer)
    # HfArgumentParser creates the Trainer's arguments, which `trainer` already holds.
    settings = trainer.get("trainer")
    settings = settings if isinstance(settings, Mapping) else {}
    aside: dict[str, dict[str, Any]] = {}
    for source, values in sources:
        for name, value in values.items():
            if name in settings and settings[name] == value:
                continue
            if name not in merged:
                merged[name] = value
            elif merged[name] != value:
                aside.setdefault(source, {}).setdefault(name, value)
    for source, values in aside.items():
        merged.setdefault(source, values)
    return merged


def _bounded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that fit into MAX_BYTES, in order."""
    values: dict[str, Any] = {}
    size, left_out = 0, []
    for name, value in config.items():
        value = plain({name: value})
        length = len(json.dumps(value))
        if size + length <= MAX_BYTES:
            values |= value
            size += length
        else:
            left_out.append(name)
    if left_out:
        logger.warning("the script's configuration is too long: left out %s.", ", ".join(left_out)[:500])
    return values


def secrets_in(values: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """Yield the strings under names of secrets, so that they can be hidden elsewhere as well."""
    for name, value in values.items():
        if isinstance(value, str) and value and is_secret_entry(str(name), value):
            yield value
        elif isinstance(value, Mapping) and depth < MAX_DEPTH:
            yield from secrets_in(value, depth + 1)


# Where a script keeps its settings


def _declared(value: Any) -> dict[str, Any]:
    """Return all entries of a declared configuration. Other than plain values are named by their type."""
    try:
        declared = _PlainValueReader(strict=False).read(value, "the script's arguments")
    except NotPlainError as error:
        logger.warning("the script's arguments are left out: %s.", error)
        return {}
    return {name: item for name, item in declared.items() if not name.startswith("_")}


def _click() -> Iterator[dict[str, Any]]:
    """Yield the parameters of the running click (or Typer) command and of its groups."""
    for name in ("click", "typer._click"):
        current = getattr(sys.modules.get(name), "get_current_context", None)
        if current is None:
            current = getattr(sys.modules.get(f"{name}.globals"), "get_current_context", None)
        context = current(silent=True) if current is not None else None
        while context is not None:
            yield _declared(dict(context.params))
            context = context.parent


def _omegaconf(scopes: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the root configurations of OmegaConf (and so Hydra) in these scopes, under any name."""
    package: Any = sys.modules.get("omegaconf")
    kind: Any = getattr(package, "DictConfig", None)
    if package is None or not isinstance(kind, type):
        return
    seen: set[int] = set()
    for scope in scopes:
        for value in list(scope.values()):
            if type(value) is not kind or id(value) in seen:
                continue
            seen.add(id(value))
            config: Any = value
            if config._get_parent() is None:
                try:
                    plain_values = package.OmegaConf.to_container(config, resolve=True)
                except package.errors.OmegaConfBaseException:
                    # An interpolation refers to a missing key, which the script may never read.
                    plain_values = package.OmegaConf.to_container(config, resolve=False)
                yield _declared(plain_values)


def _script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the script's running functions, innermost first."""
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        if is_script_file(frame.f_code.co_filename) and frame.f_code.co_name != "<module>":
            yield frame
        frame = frame.f_back


def _objects(
    main: Mapping[str, Any], scopes: Sequence[Mapping[str, Any]], seen_ids: Collection[int]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield configuration objects and their names, from the script's running functions and then its module.

    Skips objects whose id is in `known`.
    """
    for scope in (*scopes, main):
        for name, value in list(scope.items()):
            if not name.startswith("_") and id(value) not in seen_ids and _is_configuration(name, value):
                try:
                    settings = _class_values(value) if isinstance(value, type) else None
                    settings = (
                        _PlainValueReader(strict=True).read(value, f"`{name}`")
                        if settings is None
                        else settings
                    )
                except NotPlainError:
                    continue
                if isinstance(settings, dict) and settings:
                    yield name, settings


def _is_configuration(name: str, value: Any) -> bool:
    if isinstance(value, ModuleType) or (callable(value) and not isinstance(value, type)):
        return False
    named = _CONFIG_NAME.fullmatch(name) is not None
    if isinstance(value, type):
        return (
            value.__module__ == "__main__"
            and (named or _CONFIG_CLASS.fullmatch(name) is not None)
            and not dataclasses.is_dataclass(value)
        )
    if isinstance(value, argparse.Namespace):
        return True
    if isinstance(value, Mapping | SimpleNamespace):
        return named and type(value).__module__.partition(".")[0] != "omegaconf"
    if not _is_of_script(type(value)):
        return False
    return named or _CONFIG_CLASS.fullmatch(type(value).__name__) is not None


def _class_values(kind: type) -> dict[str, Any]:
    """Return the plain attributes of a class that is used as a namespace of settings."""
    return dict(_plain_items(vars(kind)))


def _config_modules(main: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the constants of the script's modules with names such as `config`."""
    for name, value in list(main.items()):
        if not isinstance(value, ModuleType) or not _CONFIG_NAME.fullmatch(name):
            continue
        if is_script_file(str(getattr(value, "__file__", None) or "<unknown>")):
            yield name, dict(_plain_items(vars(value)))


def _constants(main: Mapping[str, Any], configs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the plain values at module level. If a configuration lists most of them, return only those."""
    constants = dict(_plain_items(main))
    for config in configs:
        listed = config.keys() & constants.keys()
        if len(listed) * 2 > len(config):
            return {name: constants[name] for name in constants if name in listed}
    return constants


def _plain_items(scope: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a module or class that may be settings."""
    left = MAX_CONSTANTS
    rebound = rebound_names(str(scope.get("__file__") or ""))
    for name, value in list(scope.items()):
        if name.startswith("_") or name in rebound or left <= 0 or not _could_be_setting(value):
            continue
        try:
            plain_value = _PlainValueReader(strict=True).read(value, f"`{name}`")
        except NotPlainError:
            continue
        if not isinstance(plain_value, dict):
            left -= 1
            yield name, plain_value


def _could_be_setting(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    if type(value) in (list, tuple):
        # An empty list is usually one that the training fills.
        simple = all(isinstance(element, bool | int | float | str) for element in value[:MAX_SEQUENCE])
        return (
            0 < len(value) <= MAX_SEQUENCE
            and simple
            and sum(len(str(element)) for element in value) <= MAX_TEXT
        )
    return not isinstance(value, Mapping | set | frozenset)


def settings_of_model(model: Any) -> dict[str, Any]:
    """Return the model's `config` as the entry `model`; empty if there is none that can be read."""
    config: Any = getattr(model, "config", None)
    try:
        # Configurations of Transformers have `to_dict`.
        plain = config.to_dict() if hasattr(config, "to_dict") else config
    except Exception as error:
        before_any_run("reading the model's configuration", error)
        return {}
    try:
        reader = _PlainValueReader(strict=not isinstance(plain, Mapping))
        settings = None if plain is None else reader.read(plain, "the model's configuration")
    except NotPlainError:
        return {}
    return {"model": settings} if isinstance(settings, dict) and settings else {}

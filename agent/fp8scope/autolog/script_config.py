"""The configuration of a script that knows nothing of fp8scope, for `fp8scope run`.

It is read when the training begins. The sources, the most explicit first: what the command line was parsed to
(argparse, click), OmegaConf's and Hydra's configuration, the script's configuration objects, its constants at
module level. They are merged by name. Where two differ, the more explicit one counts, and the other's value
is kept under the name of its source. Nothing is imported for it, and no tensor is read.
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

from fp8scope.autolog.parsed_arguments import is_script_file
from fp8scope.guard import before_any_run
from fp8scope.metadata.redaction import conceal, is_secret_entry, plain

MAX_BYTES = 256 << 10
"""Of the configuration as JSON; entries beyond it are left out, the least explicit first."""
MAX_LEAVES = 2000
"""Plain values of one object."""
MAX_DEPTH = 6
MAX_CONSTANTS = 500
MAX_TEXT = 500
"""Longer texts at module level are data, not settings."""
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
    """Something that holds more than plain values, or too many of them."""


class _Reader:
    """Makes plain values of one object. `strict`: refuse what is none, instead of naming its type."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._left = MAX_LEAVES

    def read(self, value: Any, name: str) -> Any:
        """The plain form of `value`. Other errors than NotPlainError are counted under `name`.

        Raises:
            NotPlainError: it has none, or reading it failed.
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
                raise NotPlainError("names that are no texts")
            return {str(key): self._read(one, depth + 1) for key, one in items}
        if type(value) in (set, frozenset):
            return [self._read(one, depth + 1) for one in sorted(value, key=str)]
        if type(value) in (list, tuple):
            return [self._read(one, depth + 1) for one in value]
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
        # Not its text: to make one of a tensor would wait for its device, and of a model be long.
        return getattr(value, "__qualname__", None) or f"<{kind.__qualname__}>"


def _items(value: Any) -> "list[tuple[Any, Any]] | None":
    """What an object holds by name, if it is a kind that does nothing else."""
    if isinstance(value, argparse.Namespace | SimpleNamespace):
        return list(vars(value).items())
    if isinstance(value, Mapping):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(one.name, getattr(value, one.name, None)) for one in dataclasses.fields(value)]
    if (
        isinstance(value, type | enum.Enum)
        or not _is_of_script(type(value))
        or not hasattr(value, "__dict__")
    ):
        return None
    return [(name, one) for name, one in vars(value).items() if not name.startswith("_")]


def _is_of_script(kind: type) -> bool:
    """Whether a class is the script's own: one of a library has attributes that are no settings."""
    module = sys.modules.get(kind.__module__)
    return is_script_file(str(getattr(module, "__file__", None) or "<unknown>"))


def collect(namespaces: Sequence[argparse.Namespace], trainer: Mapping[str, Any]) -> dict[str, Any]:
    """The script's configuration; called from where its training begins.

    `namespaces` are what argparse has returned; `trainer` is what a trainer or the model says of itself,
    which stays as it is and comes first. Texts under names of secrets are hidden, in the command line too.
    """
    main = vars(sys.modules["__main__"])
    frames = list(_script_frames(sys._getframe(1)))
    objects = dict(_objects(main, frames, {id(each) for each in namespaces}))
    sources: list[tuple[str, Mapping[str, Any]]] = []
    for namespace in reversed(namespaces):
        sources.append(("arguments", _declared(namespace)))
    sources += [("click", each) for each in _click()]
    sources += [("omegaconf", each) for each in _omegaconf([main, *(frame.f_locals for frame in frames)])]
    generic = {name: values for name, values in objects.items() if _GENERIC_NAME.fullmatch(name)}
    sources += generic.items()
    sources.append(("objects", {name: values for name, values in objects.items() if name not in generic}))
    sources += list(_config_modules(main))
    sources.append(("constants", _constants(main, generic.values())))
    merged = _merged(trainer, sources)
    conceal(secrets_in(merged))
    return _bounded(merged)


def _merged(trainer: Mapping[str, Any], sources: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Merge by name: what comes first counts, a value that differs goes under the name of its source."""
    merged = dict(trainer)
    # Transformers' parser makes the Trainer's arguments, which are there already.
    known = trainer.get("trainer")
    known = known if isinstance(known, Mapping) else {}
    aside: dict[str, dict[str, Any]] = {}
    for source, values in sources:
        for name, value in values.items():
            if name in known and known[name] == value:
                continue
            if name not in merged:
                merged[name] = value
            elif merged[name] != value:
                aside.setdefault(source, {}).setdefault(name, value)
    for source, values in aside.items():
        merged.setdefault(source, values)
    return merged


def _bounded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Those entries that fit, in their order."""
    kept: dict[str, Any] = {}
    size, left_out = 0, []
    for name, value in config.items():
        value = plain({name: value})
        length = len(json.dumps(value))
        if size + length <= MAX_BYTES:
            kept |= value
            size += length
        else:
            left_out.append(name)
    if left_out:
        logger.warning("the script's configuration is long: %s left out.", ", ".join(left_out)[:500])
    return kept


def secrets_in(values: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """The texts under names of secrets, so that they can be hidden wherever else they stand."""
    for name, value in values.items():
        if isinstance(value, str) and value and is_secret_entry(str(name), value):
            yield value
        elif isinstance(value, Mapping) and depth < MAX_DEPTH:
            yield from secrets_in(value, depth + 1)


# Where a script keeps its settings


def _declared(value: Any) -> dict[str, Any]:
    """What was said to be configuration: all of it, things that are no plain values by their type."""
    try:
        found = _Reader(strict=False).read(value, "the script's arguments")
    except NotPlainError as error:
        logger.warning("the script's arguments are left out: %s.", error)
        return {}
    return {name: one for name, one in found.items() if not name.startswith("_")}


def _click() -> Iterator[dict[str, Any]]:
    """The parameters of the click (or Typer) command that is running, and of its groups."""
    for name in ("click", "typer._click"):
        current = getattr(sys.modules.get(name), "get_current_context", None)
        if current is None:
            current = getattr(sys.modules.get(f"{name}.globals"), "get_current_context", None)
        context = current(silent=True) if current is not None else None
        while context is not None:
            yield _declared(dict(context.params))
            context = context.parent


def _omegaconf(scopes: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Whole configurations of OmegaConf, which Hydra's are, by whatever name they are held."""
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
                    # A reference to what is not there; the script may never ask for it.
                    plain_values = package.OmegaConf.to_container(config, resolve=False)
                yield _declared(plain_values)


def _script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The script's functions that are being executed, the innermost first."""
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        if is_script_file(frame.f_code.co_filename) and frame.f_code.co_name != "<module>":
            yield frame
        frame = frame.f_back


def _objects(
    main: Mapping[str, Any], frames: Sequence[FrameType], known: Collection[int]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Configuration objects by their names, as they are held by the script's running functions and, last, by
    its module; but for those with `known` ids.
    """
    for scope in (*(frame.f_locals for frame in frames), main):
        for name, value in list(scope.items()):
            if not name.startswith("_") and id(value) not in known and _is_configuration(name, value):
                try:
                    found = _class_values(value) if isinstance(value, type) else None
                    found = _Reader(strict=True).read(value, f"`{name}`") if found is None else found
                except NotPlainError:
                    continue
                if isinstance(found, dict) and found:
                    yield name, found


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
    """The plain attributes of a class that is used as a list of settings."""
    return dict(_plain_items(vars(kind)))


def _config_modules(main: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The constants of modules such as `config.py` that belong to the script."""
    for name, value in list(main.items()):
        if not isinstance(value, ModuleType) or not _CONFIG_NAME.fullmatch(name):
            continue
        if is_script_file(str(getattr(value, "__file__", None) or "<unknown>")):
            yield name, dict(_plain_items(vars(value)))


def _constants(main: Mapping[str, Any], configs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Plain values at module level; where the script itself lists which are settings, only these."""
    found = dict(_plain_items(main))
    for config in configs:
        listed = config.keys() & found.keys()
        if len(listed) * 2 > len(config):
            return {name: found[name] for name in found if name in listed}
    return found


def _plain_items(scope: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values of a module or a class that could be settings."""
    left = MAX_CONSTANTS
    for name, value in list(scope.items()):
        if name.startswith("_") or left <= 0 or not _could_be_setting(value):
            continue
        try:
            plain_value = _Reader(strict=True).read(value, f"`{name}`")
        except NotPlainError:
            continue
        if not isinstance(plain_value, dict):
            left -= 1
            yield name, plain_value


def _could_be_setting(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    if type(value) in (list, tuple):
        # Lists that are empty now are mostly filled by the training.
        simple = all(isinstance(each, bool | int | float | str) for each in value[:MAX_SEQUENCE])
        return 0 < len(value) <= MAX_SEQUENCE and simple and sum(len(str(each)) for each in value) <= MAX_TEXT
    return not isinstance(value, Mapping | set | frozenset)


def settings_of_model(model: Any) -> dict[str, Any]:
    """What the model's `config` says, as the entry `model`; empty where it has none that can be read."""
    config: Any = getattr(model, "config", None)
    try:
        # Transformers' configurations know their plain form.
        known = config.to_dict() if hasattr(config, "to_dict") else config
    except Exception as error:
        before_any_run("reading the model's configuration", error)
        return {}
    try:
        reader = _Reader(strict=not isinstance(known, Mapping))
        found = None if known is None else reader.read(known, "the model's configuration")
    except NotPlainError:
        return {}
    return {"model": found} if isinstance(found, dict) and found else {}

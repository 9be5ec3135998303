"""Weights & Biases: `wandb.log`, `config`, `summary` and `define_metric`, also while it is disabled."""

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from fp8scope.capture.capture import ValueCapture
from fp8scope.capture.media import of_wandb
from fp8scope.capture.patching import TrackerPatches

NAME = "wandb"


class StepCounter:
    """Counts the steps of runs as wandb does, also of runs that count none because they are disabled."""

    def __init__(self) -> None:
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def next(self, run: Any, step: Any, *, commits: bool, first: int = 0) -> int | None:
        """Return the step of a call, and count on if the call `commits`. `first`: the step of a new run."""
        current = self._steps.get(run, first)
        if step is None:
            number = current
        elif isinstance(step, int):
            number = step
        else:
            return None
        self._steps[run] = max(current, number) + commits
        return number

    def current(self, run: Any) -> int:
        """Return the step of the next call."""
        return self._steps.get(run, 0)


def take_logged(capture: ValueCapture, data: Any, count: int | None) -> None:
    """Record what `Run.log` is given: values, and images and tables."""
    values, media = of_wandb(data) if isinstance(data, Mapping) else (data, [])
    capture.take(NAME, values, count, separator=".", replaces=True)
    if media:
        capture.take_media(NAME, lambda: iter(media))


class WandbCalls:
    """Notes the calls of wandb's objects, before they are carried out."""

    def __init__(self, patches: TrackerPatches) -> None:
        self._patches = patches
        self._capture = patches.capture
        self._counter = StepCounter()
        self._inside = threading.local()

    def run_log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `Run.log`."""

        @functools.wraps(original)
        def log(
            run: Any, data: Any = None, step: Any = None, commit: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            try:
                commits = bool(commit) or (commit is None and step is None)
                count = self._counter.next(run, step, commits=commits, first=getattr(run, "_local_step", 0))
                take_logged(self._capture, data, count)
            except Exception as error:
                self._capture.caught("capturing wandb.log", error)
            # A disabled run writes the values into its summary.
            self._inside.log = True
            try:
                return original(run, data, step, commit, *args, **kwargs)
            finally:
                self._inside.log = False

        return log

    def config_update(self, config: Any, d: Any, *_: Any, **__: Any) -> None:
        """Called before `Config.update`."""
        config = d if isinstance(d, Mapping) else getattr(d, "__dict__", {})
        self._capture.configure(NAME, {key: config[key] for key in config if not str(key).startswith("_")})

    def config_set(self, config: Any, key: Any, val: Any) -> None:
        """Called before `config[key] = val` and `config.key = val`."""
        if not str(key).startswith("_"):
            self._capture.configure(NAME, {key: val})

    def summary_update(self, summary: Any, d: Any = None, *_: Any, **__: Any) -> None:
        """Called before `Summary.update`."""
        if isinstance(d, Mapping) and not getattr(self._inside, "log", False):
            self._capture.summarise(NAME, d)

    def summary_set(self, summary: Any, key: Any, val: Any) -> None:
        """Called before an entry of the summary of a disabled run is set."""
        if not getattr(self._inside, "log", False):
            self._capture.summarise(NAME, {key: val})

    def define_metric(self, run: Any, name: Any, step_metric: Any = None, *_: Any, **__: Any) -> None:
        """Called before `Run.define_metric`."""
        if step_metric is not None:
            self._capture.note_step_metric(NAME, name, getattr(step_metric, "name", step_metric))

    def init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `wandb.init`: the run that it returns has the whole configuration."""

        @functools.wraps(original)
        def init(*args: Any, **kwargs: Any) -> Any:
            run = original(*args, **kwargs)
            try:
                self.take_config(run)
            except Exception as error:
                self._capture.caught("capturing the configuration of wandb", error)
            return run

        return init

    def take_config(self, run: Any) -> None:
        """Take the configuration of a run that has begun."""
        config = getattr(run, "config", None)
        if config is not None and hasattr(config, "keys"):
            self._capture.configure(NAME, {key: config[key] for key in list(config.keys())})


def install(patches: TrackerPatches) -> None:
    """Capture the calls of wandb's objects, where they are defined."""
    calls = WandbCalls(patches)

    def replace_run(module: ModuleType) -> None:
        patches.replace(module.Run, "log", calls.run_log, tracker=NAME)
        patches.before(module.Run, "define_metric", calls.define_metric, tracker=NAME)

    def replace_disabled_run(module: ModuleType) -> None:
        patches.replace(module.NoopRun, "log", calls.run_log, tracker=NAME)
        patches.before(module.NoopRun, "define_metric", calls.define_metric, tracker=NAME)

    def replace_config(module: ModuleType) -> None:
        patches.before(module.Config, "update", calls.config_update, tracker=NAME)
        patches.before(module.Config, "__setitem__", calls.config_set, tracker=NAME)
        patches.before(module.Config, "__setattr__", calls.config_set, tracker=NAME)

    def replace_summary(module: ModuleType) -> None:
        patches.before(module.SummaryDict, "update", calls.summary_update, tracker=NAME)

    def replace_disabled_summary(module: ModuleType) -> None:
        patches.before(module.SummaryDisabled, "update", calls.summary_update, tracker=NAME)
        patches.before(module.SummaryDisabled, "__setitem__", calls.summary_set, tracker=NAME)
        patches.before(module.SummaryDisabled, "__setattr__", calls.summary_set, tracker=NAME)

    def replace_module(module: Any) -> None:
        patches.replace(module, "init", calls.init, tracker=NAME)
        run = getattr(module, "run", None)
        if run is not None:
            # The script has begun its run: the module's `log` is a method of it, from before.
            calls.take_config(run)
            earlier = module.log
            module.log = run.log
            patches.on_restore(lambda: _restore_log(module, run, earlier))

    patches.when_imported("wandb.sdk.wandb_run", replace_run)
    patches.when_imported("wandb.sdk.lib.noop_run", replace_disabled_run)
    patches.when_imported("wandb.sdk.wandb_config", replace_config)
    patches.when_imported("wandb.sdk.wandb_summary", replace_summary)
    patches.when_imported("wandb.sdk.lib.disabled", replace_disabled_summary)
    patches.when_imported("wandb", replace_module)


def _restore_log(module: Any, run: Any, earlier: Any) -> None:
    if module.run is run:
        module.log = earlier

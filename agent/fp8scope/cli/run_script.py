"""`fp8scope run`: record an unmodified training script.

The script runs in this process as `__main__`, with the arguments, the search path, the exit status and the
traceback that it has without fp8scope. Recording starts with its first training step.
"""

import argparse
import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fp8scope.autolog.parsed_arguments import ParsedArguments
from fp8scope.autolog.script_config import collect
from fp8scope.cli.script import ProgramNotFoundError, find_module, find_script
from fp8scope.config import ConfigurationError, check_capture, overhead_from, settings_from
from fp8scope.guard import before_any_run, configure_logging
from fp8scope.integrations.registered_names import register
from fp8scope.process.import_hook import when_imported
from fp8scope.process.open_runs import live_runs
from fp8scope.recording.registration import RELATIONS, blank_registration, check_registration
from fp8scope.unrecorded import unrecorded

if TYPE_CHECKING:
    from fp8scope.autolog.discovery import Discovery
    from fp8scope.capture.capture import ValueCapture
    from fp8scope.run import Run

RECIPES = {
    "delayed": "DelayedScaling",
    "current": "CurrentScaling",
    "rowwise": "RowwiseScaling",
    "block": "BlockScaling",
    "mxfp8": "MXFP8",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
}
logger = logging.getLogger("fp8scope")


def run(arguments: list[str]) -> int:
    """Run an unmodified training script and record it."""
    own, target, module, rest = split(arguments)
    options = _parser().parse_args(own)
    if target is None:
        _parser().error("no script given; for example: fp8scope run train.py --lr 1e-3")
    configure_logging()
    try:
        _check(options)
    except ConfigurationError as error:
        print(f"fp8scope: {error}", file=sys.stderr)
        return 2
    try:
        program = find_module(target) if module else find_script(target)
    except ProgramNotFoundError as error:
        print(f"fp8scope: {error}", file=sys.stderr)
        return 2
    watching = _Watching(options)
    watching.begin()
    sys.argv = [program.argv0, *rest]
    if not sys.flags.safe_path:
        sys.path[0] = program.directory
    try:
        program.execute()
    finally:
        watching.end()
        watching.warn_if_nothing_was_recorded()
    return 0


def split(arguments: Sequence[str]) -> tuple[list[str], str | None, bool, list[str]]:
    """Split into our options, the script or module, whether it is a module, and its arguments.

    As in Python, everything after the script or after `-m MODULE` belongs to the script.
    """
    values = {flag for action in _parser()._actions for flag in action.option_strings if action.nargs != 0}
    own: list[str] = []
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        if argument == "-m":
            module = arguments[index + 1] if index + 1 < len(arguments) else None
            return own, module, True, list(arguments[index + 2 :])
        if argument == "--" or not argument.startswith("-") or argument == "-":
            index += argument == "--"
            script = arguments[index] if index < len(arguments) else None
            return own, script, False, list(arguments[index + 1 :])
        width = 2 if argument in values else 1
        own += arguments[index : index + width]
        index += width
    return own, None, False, []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp8scope run",
        description="Run a training script and record it. The script does not have to be changed.",
        usage="fp8scope run [OPTIONS] (SCRIPT | -m MODULE) [SCRIPT ARGUMENTS]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--convert",
        choices=sorted(RECIPES),
        help="convert the model's linear layers to FP8 or FP4 with this recipe",
    )
    parser.add_argument("--project", help="the project whose login to use")
    parser.add_argument("--name", help="the name of the run (default: the script and the time)")
    parser.add_argument("--group", default="", help="the group of runs that differ only in their seed")
    parser.add_argument("--baseline", default="", help="the group, or the id of the run, to compare with")
    parser.add_argument("--parent", default="", help="the id of the run that this new run comes from")
    parser.add_argument(
        "--relation", choices=RELATIONS, default="", help="how it comes from there (default: resumed)"
    )
    parser.add_argument(
        "--data-hash", action="store_true", help="log a hash of each step's batches, to pair runs by data"
    )
    parser.add_argument("--seed", type=int, help="the seed of the run")
    parser.add_argument("--tag", action="append", default=[], dest="tags", help="a tag; can be repeated")
    parser.add_argument(
        "--tokens-per-step", type=int, default=0, help="tokens of a step, if they cannot be counted"
    )
    parser.add_argument(
        "--overhead",
        help="share of the step time that watching may take (default: 0.02; none: no limit)",
    )
    parser.add_argument(
        "--capture",
        help="other trackers whose values are recorded too: auto (default), none, or names such as wandb,aim",
    )
    parser.add_argument(
        "--advise", action="store_true", help="say at the end how the training could be faster"
    )
    parser.add_argument(
        "--mode",
        choices=("online", "offline", "disabled"),
        help="send the run, only store it, or record nothing",
    )
    return parser


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigurationError now, instead of in the middle of the script, if an option is invalid."""
    if options.overhead is not None:
        overhead_from(options.overhead, "--overhead")
        # For processes that the script starts, and for `init`.
        os.environ["FP8SCOPE_OVERHEAD"] = options.overhead
    if options.capture is not None:
        check_capture(options.capture, "--capture")
        os.environ["FP8SCOPE_CAPTURE"] = options.capture
    options.trackers = settings_from(project=options.project, mode=options.mode).capture
    given = {
        key: getattr(options, key) for key in ("group", "baseline", "parent", "relation", "seed", "tags")
    }
    check_registration(blank_registration("a run" if options.name is None else options.name) | given)
    if options.tokens_per_step < 0:
        raise ConfigurationError(f"--tokens-per-step must not be negative, got {options.tokens_per_step}.")


class _Watching:
    """Observes the script, from its import of torch on, and restores everything afterwards."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._discovery: Discovery | None = None
        self._broken = False
        """Whether the agent cannot begin here."""
        self._arguments = ParsedArguments()
        self._cancel: Callable[[], None] = lambda: None
        self._cancel_names: Callable[[], None] = lambda: None
        self._earlier_threads: set[threading.Thread] = set()
        self._capture: ValueCapture | None = None
        self._untrained: Run | None = None
        """A run that began with the values of a tracker, before any training was found."""

    def begin(self) -> None:
        """Called before the script runs."""
        self._earlier_threads = set(threading.enumerate())
        self._arguments.install()
        if self._options.mode != "disabled" and self._options.trackers:
            self._start_capture()
        self._cancel_names = register()
        self._cancel = when_imported("torch", self._install)

    def end(self) -> None:
        """Called after the script: restore what was replaced; at exit if a thread of the script goes on."""
        script_threads = set(threading.enumerate()) - self._earlier_threads
        if any(not thread.daemon for thread in script_threads):
            # The thread may train: the interpreter waits for it before it runs the exit handlers.
            atexit.register(self._restore)
        else:
            self._restore()

    def _restore(self) -> None:
        self._cancel()
        self._cancel_names()
        if self._capture is not None:
            from fp8scope.capture import active

            active.stop(self._capture)
        self._arguments.restore()
        if self._discovery is not None:
            self._discovery.uninstall()

    def _install(self) -> None:
        try:
            self._look_for_training()
        except Exception as error:
            self._broken = True
            unrecorded(error)

    def _look_for_training(self) -> None:
        from fp8scope.autolog.discovery import Discovery
        from fp8scope.integrations.common import converter

        options = self._options
        recipe = None
        if options.convert is not None:
            import fp8scope_kernels

            recipe = getattr(fp8scope_kernels, RECIPES[options.convert])()
        self._discovery = Discovery(
            self._begin, converter(recipe), options.tokens_per_step, lambda: self._untrained
        )
        self._discovery.install()

    def _start_capture(self) -> None:
        """Record what the script gives to other trackers."""
        try:
            # Needs NumPy, without which the script runs and is not recorded.
            from fp8scope.capture import active

            self._capture = active.start(self._options.trackers, self._begin_without_training)
        except Exception as error:
            before_any_run("capturing the calls of other trackers", error)

    def _begin_without_training(self, is_last: bool) -> "Run | None":
        """Begin a run for values that the script gives to a tracker, if it does not train with torch.

        `is_last`: whether the values cannot wait for a training any longer.
        """
        discovery = self._discovery
        if discovery is not None and (discovery.has_ended or (discovery.expects_training and not is_last)):
            return None
        from fp8scope.run import Run

        run = self._begin()
        if not isinstance(run, Run):
            return None
        self._untrained = run
        return run

    def _begin(self, **plain_config: Any) -> "Run":
        import fp8scope
        from fp8scope import run as recording

        if self._untrained is not None and not self._untrained.finished:
            # Training is found after all: it continues the steps of the run.
            self._untrained.log_config(plain_config.get("config") or {})
            return self._untrained
        options = self._options
        given = {
            "project": options.project,
            "name": options.name,
            "group": options.group,
            "baseline": options.baseline,
            "parent": options.parent,
            "relation": options.relation,
            "data_hash": options.data_hash or None,
            "seed": options.seed,
            "tags": options.tags,
            "mode": options.mode,
        }
        config, failure = self._config(plain_config.get("config") or {})
        chosen = {key: value for key, value in given.items() if value not in (None, "", [])}
        run = fp8scope.init(**(plain_config | {"config": config} | chosen))
        if self._capture is not None and isinstance(run, recording.Run):
            self._capture.bind(run)
        if options.advise:
            from fp8scope.advice.in_process import print_at_end

            print_at_end(run.flight)
        if failure is not None:
            run.guard.caught("reading the script's configuration", failure)
        return run

    def _config(self, plain_config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Exception | None]:
        """Return the run's configuration, and the exception of reading it, if any."""
        try:
            return collect(self._arguments.namespaces, plain_config), None
        except Exception as error:
            return plain_config, error

    def warn_if_nothing_was_recorded(self) -> None:
        """Log a warning if no run was begun."""
        if self._options.mode == "disabled" or live_runs or self._broken:
            return
        if self._untrained is None and (self._discovery is None or self._discovery.run is None):
            logger.warning(
                "nothing was recorded: no training step was found. A step is a call of a torch optimizer, or "
                "without one a backward pass, for parameters of a torch.nn.Module that was called in "
                "training mode in this process."
            )

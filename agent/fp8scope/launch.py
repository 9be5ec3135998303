"""`fp8scope run`: record a training script that knows nothing of it.

The script is run in this process, as its `__main__`, with the arguments, the search path, the exit status and
the traceback that it would have alone. What is recorded begins with its first training step.
"""

import argparse
import importlib.abc
import importlib.util
import io
import logging
import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any

from fp8scope.config import ConfigurationError, settings_from
from fp8scope.guard import configure_logging
from fp8scope.hooks import live_runs
from fp8scope.registration import blank_registration, check_registration

if TYPE_CHECKING:
    from fp8scope.attachment.discovery import Discovery
    from fp8scope.run import Run

RECIPES = {
    "delayed": "DelayedScaling",
    "current": "CurrentScaling",
    "rowwise": "RowwiseScaling",
    "block": "BlockScaling",
    "mxfp8": "MXFP8",
}
logger = logging.getLogger("fp8scope")
_kept: list[object] = []
"""What must live as long as the process."""


def run(arguments: list[str]) -> int:
    """Run an unmodified training script, and record it."""
    own, target, module, rest = split(arguments)
    options = _parser().parse_args(own)
    if target is None:
        _parser().error("which script? Like: fp8scope run train.py --lr 1e-3")
    configure_logging()
    try:
        _check(options)
    except ConfigurationError as error:
        print(f"fp8scope: {error}", file=sys.stderr)
        return 2
    try:
        program = _module(target) if module else _script(target)
    except _NotFoundError as error:
        print(f"fp8scope: {error}", file=sys.stderr)
        return 2
    watching = _Watching(options)
    when_imported("torch", watching.install)
    sys.argv = [program.argv0, *rest]
    if not sys.flags.safe_path:
        sys.path[0] = program.directory
    try:
        _execute(program)
    finally:
        watching.tell()
    return 0


def split(arguments: Sequence[str]) -> tuple[list[str], str | None, bool, list[str]]:
    """Our options, the script or module, whether it is a module, and the arguments that are its own.

    As Python does: everything after the script, or after `-m MODULE`, belongs to it.
    """
    values = {flag for action in _parser()._actions for flag in action.option_strings if action.nargs != 0}
    own: list[str] = []
    index = 0
    while index < len(arguments):
        one = arguments[index]
        if one == "-m":
            found = arguments[index + 1] if index + 1 < len(arguments) else None
            return own, found, True, list(arguments[index + 2 :])
        if one == "--" or not one.startswith("-") or one == "-":
            index += one == "--"
            found = arguments[index] if index < len(arguments) else None
            return own, found, False, list(arguments[index + 1 :])
        width = 2 if one in values else 1
        own += arguments[index : index + width]
        index += width
    return own, None, False, []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp8scope run",
        description="Run a training script and record it; nothing in it needs to be changed.",
        usage="fp8scope run [OPTIONS] (SCRIPT | -m MODULE) [ARGUMENTS OF ITS OWN]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--convert", choices=sorted(RECIPES), help="make its linear layers FP8 by this recipe"
    )
    parser.add_argument("--project", help="which login to use, where there are several")
    parser.add_argument("--name", help="the run's name (default: the script's, and the time)")
    parser.add_argument("--group", default="", help="the runs that differ from this one only in their seed")
    parser.add_argument("--baseline", default="", help="the group to compare with")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--tag", action="append", default=[], dest="tags")
    parser.add_argument("--tokens-per-step", type=int, default=0, help="where they cannot be counted")
    parser.add_argument("--mode", choices=("online", "offline", "disabled"))
    return parser


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigurationError now for what `init` would refuse in the middle of the script."""
    settings_from(project=options.project, mode=options.mode)
    given = {key: getattr(options, key) for key in ("group", "baseline", "seed", "tags")}
    check_registration(blank_registration("a run" if options.name is None else options.name) | given)
    if options.tokens_per_step < 0:
        raise ConfigurationError(f"--tokens-per-step must not be negative, got {options.tokens_per_step}.")


class _Watching:
    """What is found out about the script, once it imports torch."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._discovery: Discovery | None = None

    def install(self) -> None:
        from fp8scope.attachment.discovery import Discovery
        from fp8scope.integrations.common import converter

        options = self._options
        recipe = None
        if options.convert is not None:
            import fp8scope_kernels

            recipe = getattr(fp8scope_kernels, RECIPES[options.convert])()
        self._discovery = Discovery(self._begin, converter(recipe), options.tokens_per_step)
        self._discovery.install()

    def _begin(self, **known: Any) -> "Run":
        import fp8scope

        options = self._options
        told = {
            "project": options.project,
            "name": options.name,
            "group": options.group,
            "baseline": options.baseline,
            "seed": options.seed,
            "tags": options.tags,
            "mode": options.mode,
        }
        return fp8scope.init(
            **(known | {key: value for key, value in told.items() if value not in (None, "", [])})
        )

    def tell(self) -> None:
        """Say so when nothing was recorded."""
        if self._options.mode == "disabled" or live_runs:
            return
        if self._discovery is None or self._discovery.run is None:
            logger.warning(
                "nothing was recorded: no training step was seen. A step is a torch optimizer's, over "
                "parameters of a torch.nn.Module that was called in training mode in this process."
            )


class _NotFoundError(Exception):
    """There is no such script or module."""


class _Program:
    """Something to be executed as `__main__`."""

    def __init__(
        self, argv0: str, directory: str, code: Callable[[], CodeType], spec: ModuleSpec | None
    ) -> None:
        self.argv0 = argv0
        self.directory = directory
        self.code = code
        self.spec = spec


def _script(path: str) -> _Program:
    file = Path(path)
    if file.is_dir():
        raise _NotFoundError(f"{path} is a directory: name the script in it.")
    if not file.is_file():
        raise _NotFoundError(f"there is no script {path} (in {Path.cwd()}).")

    def code() -> CodeType:
        with io.open_code(str(file.absolute())) as source:
            return compile(source.read(), str(file.absolute()), "exec", dont_inherit=True)

    # Python puts the folder of the file itself first, not that of a link to it.
    return _Program(path, str(file.resolve().parent), code, None)


def _module(name: str) -> _Program:
    directory, before = os.getcwd(), sys.path[0]
    if not sys.flags.safe_path:
        sys.path[0] = directory
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ModuleNotFoundError, ValueError) as error:
        sys.path[0] = before
        raise _NotFoundError(f"there is no module {name} ({error}).") from None
    if spec is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
        raise _NotFoundError(f"there is no module {name} that could be run.")
    loader, found = spec.loader, spec

    def code() -> CodeType:
        compiled = loader.get_code(found.name)
        assert compiled is not None
        return compiled

    return _Program(spec.origin or name, directory, code, spec)


def _execute(program: _Program) -> None:
    """Run it as `__main__`, and end as it would have ended alone."""
    module = types.ModuleType("__main__")
    spec = program.spec
    module.__dict__.update(
        __annotations__={},
        __builtins__=sys.modules["builtins"],
        __cached__=None if spec is None else spec.cached,
        __loader__=SourceFileLoader("__main__", program.argv0) if spec is None else spec.loader,
        __package__=None if spec is None else spec.parent,
        __spec__=spec,
    )
    # What the process began as goes on to use its own names; and the script's must be there at its exit.
    _kept.extend((sys.modules["__main__"], module))
    sys.modules["__main__"] = module
    try:
        code = program.code()
        module.__file__ = code.co_filename
        exec(code, module.__dict__)
    except SystemExit as error:
        for run in list(live_runs):
            run._note_failure(error)
        raise
    except BaseException as error:
        error.__traceback__ = without_ours(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        # It was shown, as the script's own; the interpreter does the rest (status, signals, exit handlers).
        sys.excepthook = lambda kind, value, trace: None
        raise


def without_ours(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this package that lie between those of the script."""
    package = os.path.dirname(os.path.abspath(__file__)) + os.sep
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    kept = None
    for one in reversed(frames):
        ours = one.tb_frame.f_code.co_filename.startswith(package)
        # Where ours is the last, the error is ours: then it shows.
        if not ours or kept is None and one is frames[-1] and one.tb_frame.f_code.co_filename != __file__:
            one.tb_next = kept
            kept = one
    return kept


def when_imported(name: str, call: Callable[[], None]) -> None:
    """Call `call()` right after the module `name` was imported; now, if it was already."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the others find the module, and wraps its loader."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name = name
        self._call = call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            call = self._call

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                # So that whoever asks for its loader later finds it as it was.
                del loader.exec_module
                try:
                    call()
                except Exception as error:
                    logger.warning("nothing will be recorded: %s: %s", type(error).__name__, error)

            loader: Any = spec.loader
            loader.exec_module = exec_module
        return spec

"""Finds and runs a script or module as Python does: as `__main__`, with the same exit and traceback."""

import importlib.abc
import importlib.util
import io
import os
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, TracebackType

from fp8scope.process.open_runs import live_runs

_immortal: list[object] = []
"""Modules that must live as long as the process."""


class ProgramNotFoundError(Exception):
    """The script or module does not exist."""


class Program:
    """A script or module that can be executed as `__main__`."""

    def __init__(
        self, argv0: str, directory: str, code: Callable[[], CodeType], spec: ModuleSpec | None
    ) -> None:
        self.argv0 = argv0
        self.directory = directory
        self.code = code
        self.spec = spec

    def execute(self) -> None:
        """Run it as `__main__`; exceptions leave it as they would without fp8scope."""
        module = types.ModuleType("__main__")
        spec = self.spec
        module.__dict__.update(
            __annotations__={},
            __builtins__=sys.modules["builtins"],
            __cached__=None if spec is None else spec.cached,
            __loader__=SourceFileLoader("__main__", self.argv0) if spec is None else spec.loader,
            __package__=None if spec is None else spec.parent,
            __spec__=spec,
        )
        # The original `__main__` still runs, and the exit handlers need the module of the script.
        _immortal.extend((sys.modules["__main__"], module))
        sys.modules["__main__"] = module
        try:
            code = self.code()
            module.__file__ = code.co_filename
            exec(code, module.__dict__)
        except SystemExit as error:
            for run in list(live_runs):
                run.session.note_failure(error)
            raise
        except BaseException as error:
            error.__traceback__ = without_ours(error.__traceback__)
            sys.excepthook(type(error), error, error.__traceback__)
            # It was shown above; the interpreter does the rest (status, signals, exit handlers).
            sys.excepthook = lambda kind, value, trace: None
            raise


def find_script(path: str) -> Program:
    """Return the script in a file. Raises ProgramNotFoundError if there is none."""
    file = Path(path)
    if file.is_dir():
        raise ProgramNotFoundError(f"{path} is a directory, not a script.")
    if not file.is_file():
        raise ProgramNotFoundError(f"there is no script {path} (in {Path.cwd()}).")

    def code() -> CodeType:
        with io.open_code(str(file.absolute())) as source:
            return compile(source.read(), str(file.absolute()), "exec", dont_inherit=True)

    # Python resolves links: the first search path is the folder of the file itself.
    return Program(path, str(file.resolve().parent), code, None)


def find_module(name: str) -> Program:
    """Return what `python -m name` runs. Raises ProgramNotFoundError if there is no such module."""
    directory, before = os.getcwd(), sys.path[0]
    if not sys.flags.safe_path:
        sys.path[0] = directory
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ModuleNotFoundError, ValueError) as error:
        sys.path[0] = before
        raise ProgramNotFoundError(f"there is no module {name} ({error}).") from None
    if spec is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
        raise ProgramNotFoundError(f"the module {name} cannot be run.")
    loader, module_spec = spec.loader, spec

    def code() -> CodeType:
        compiled = loader.get_code(module_spec.name)
        assert compiled is not None
        return compiled

    return Program(spec.origin or name, directory, code, spec)


def without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of this package between those of the script."""
    package = str(Path(__file__).absolute().parents[1]) + os.sep
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    last_entry = None
    for entry in reversed(frames):
        ours = entry.tb_frame.f_code.co_filename.startswith(package)
        # A last frame of this package is shown: the error is ours.
        if (
            not ours
            or last_entry is None
            and entry is frames[-1]
            and entry.tb_frame.f_code.co_filename != __file__
        ):
            entry.tb_next = last_entry
            last_entry = entry
    return last_entry

"""Calls a function as soon as the program has imported a module."""

import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from fp8scope.guard import before_any_run


def when_imported(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Call `call()` right after the module `name` is imported, or now if it already is.

    Returns a function that cancels this.
    """
    if name in sys.modules:
        call()
        return lambda: None
    finder = _WrappingFinder(name, call)
    sys.meta_path.insert(0, finder)

    def cancel() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    return cancel


class _WrappingFinder(importlib.abc.MetaPathFinder):
    """Lets the other finders find the module, and wraps its loader."""

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
                # Restore the loader.
                del loader.exec_module
                try:
                    call()
                except Exception as error:
                    before_any_run("finding the training, of which nothing will be recorded,", error)

            loader: Any = spec.loader
            loader.exec_module = exec_module
        return spec

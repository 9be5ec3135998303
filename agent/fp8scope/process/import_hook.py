"""Calls a function as soon as the program has imported a module."""

import importlib.abc
import importlib.util
import sys
import threading
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
    """Lets the other finders find the module, and wraps its loader.

    It stays until the module is executed: a program may ask for it (`find_spec`) long before it imports it.
    """

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name = name
        self._call = call
        self._asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or getattr(self._asking, "others", False):
            return None
        self._asking.others = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking.others = False
        if spec is not None and spec.loader is not None:
            self._wrap(spec.loader)
        return spec

    def _wrap(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            # Restore the loader, which others may wait for, too.
            vars(loader).pop("exec_module", None)
            if self not in sys.meta_path:
                return
            sys.meta_path.remove(self)
            try:
                self._call()
            except Exception as error:
                before_any_run("finding the training, of which nothing will be recorded,", error)

        loader.exec_module = exec_module

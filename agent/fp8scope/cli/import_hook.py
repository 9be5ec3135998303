"""Do something as soon as a module has been imported, by whomever; nothing is imported for it."""

import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from fp8scope.guard import before_any_run


def when_imported(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Call `call()` right after the module `name` was imported; now, if it was already.

    Returns a function that takes this back, where the module has not been imported.
    """
    if name in sys.modules:
        call()
        return lambda: None
    finder = _Finder(name, call)
    sys.meta_path.insert(0, finder)

    def cancel() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    return cancel


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
                    before_any_run("finding the training, of which nothing will be recorded,", error)

            loader: Any = spec.loader
            loader.exec_module = exec_module
        return spec

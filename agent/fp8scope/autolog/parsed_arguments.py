"""Keeps what `argparse` returns to an unmodified script, for `fp8scope run`."""

import argparse
import functools
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

MAX_NAMESPACES = 16
_METHODS = ("parse_known_args", "parse_known_intermixed_args")
_OURS = str(Path(__file__).resolve().parents[1])


class ParsedArguments:
    """The namespaces that parsers returned between `install` and `restore`, oldest first.

    They are kept by reference: scripts change them after parsing, and the values at the beginning of the
    training are recorded.
    """

    def __init__(self) -> None:
        self.namespaces: list[argparse.Namespace] = []
        self._replaced: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._nested = threading.local()

    def install(self) -> None:
        """Wrap the parsing methods of `argparse.ArgumentParser`."""
        for name in _METHODS:
            original = getattr(argparse.ArgumentParser, name)
            noting = self._noting(original)
            self._replaced[name] = (original, noting)
            setattr(argparse.ArgumentParser, name, noting)

    def restore(self) -> None:
        """Restore the methods, unless they were replaced again, and drop the namespaces."""
        for name, (original, noting) in self._replaced.items():
            if getattr(argparse.ArgumentParser, name) is noting:
                setattr(argparse.ArgumentParser, name, original)
        self._replaced.clear()
        self.namespaces.clear()

    def _noting(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(parse)
        def noting(
            parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None, *more: Any, **named: Any
        ) -> Any:
            # A subcommand is parsed inside the call of the main parser, whose result includes it.
            depth = getattr(self._nested, "depth", 0)
            self._nested.depth = depth + 1
            try:
                result = parse(parser, args, namespace, *more, **named)
            finally:
                self._nested.depth = depth
            if depth == 0 and self._replaced and self._is_of_script(args, sys._getframe(1)):
                self._note(result)
            return result

        return noting

    def _is_of_script(self, args: Any, frame: FrameType | None) -> bool:
        """Return whether the command line was parsed, or the script called the parser, not a library."""
        if args is None or list(args) == sys.argv[1:]:
            return True
        while frame is not None and frame.f_code.co_filename == argparse.__file__:
            frame = frame.f_back
        return frame is not None and is_script_file(frame.f_code.co_filename)

    def _note(self, result: Any) -> None:
        namespace = result[0] if isinstance(result, tuple) and result else None
        if not isinstance(namespace, argparse.Namespace):
            return
        if all(namespace is not earlier for earlier in self.namespaces):
            self.namespaces.append(namespace)
            del self.namespaces[:-MAX_NAMESPACES]


def is_script_file(filename: str) -> bool:
    """Return whether the file is a user's script: not of Python, an installed package or fp8scope."""
    if filename.startswith("<") or "site-packages" in filename or "dist-packages" in filename:
        return False
    return not filename.startswith(_library_folders())


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return (_OURS, *{paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})

"""A static files finder for plotly's script: the small one that the build brings, or the package's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import plotly
from django.contrib.staticfiles.finders import BaseFinder
from django.core.checks import CheckMessage
from django.core.files.storage import FileSystemStorage

FOLDER, FILE = "plotly", "plotly.min.js"
# The name of the script among the static files.
PLOTLY = f"{FOLDER}/{FILE}"
BUNDLE: Final = Path(__file__).parent / "plotly_bundle"
"""The folder where build_backend/plotly_bundle.py puts the script."""
PACKAGE: Final = Path(plotly.__file__).parent / "package_data"
VERSION: Final = re.compile(r"plotly\.js[^\n]* v(\d+)\.")
HEADER_CHARACTERS: Final = 200


def folder_of_script(bundle: Path = BUNDLE, package: Path = PACKAGE) -> Path:
    """The folder with the script to serve: `bundle` if it has one for the figures of the installed plotly.

    Figures are documents of plotly.py, whose format may change with the major version of plotly.js.
    """
    major = _major_version(bundle / FILE)
    return bundle if major is not None and major == _major_version(package / FILE) else package


def _major_version(script: Path) -> str | None:
    try:
        with script.open(encoding="utf-8") as file:
            match = VERSION.search(file.read(HEADER_CHARACTERS))
    except FileNotFoundError:
        return None
    return match[1] if match else None


class PlotlyFinder(BaseFinder):
    """Finds only `plotly/plotly.min.js`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._storage = FileSystemStorage(location=str(folder_of_script()))
        # The folder into which collectstatic copies the file.
        self._storage.prefix = FOLDER  # type: ignore[attr-defined]

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        return []

    def find(self, path: str, find_all: bool = False, **kwargs: Any) -> Any:
        paths = [self._storage.path(FILE)] if path == PLOTLY else []
        return paths if find_all else (paths[0] if paths else [])

    def list(self, ignore_patterns: Iterable[str] | None) -> Iterable[tuple[str, FileSystemStorage]]:
        yield FILE, self._storage

"""A static files finder for the JavaScript of the installed plotly package, which is not vendored."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import plotly
from django.contrib.staticfiles.finders import BaseFinder
from django.core.checks import CheckMessage
from django.core.files.storage import FileSystemStorage

FOLDER, FILE = "plotly", "plotly.min.js"
# The name of the script among the static files.
PLOTLY = f"{FOLDER}/{FILE}"


class PlotlyFinder(BaseFinder):
    """Finds only `plotly/plotly.min.js`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._storage = FileSystemStorage(location=str(Path(plotly.__file__).parent / "package_data"))
        # The folder into which collectstatic copies the file.
        self._storage.prefix = FOLDER  # type: ignore[attr-defined]

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        return []

    def find(self, path: str, find_all: bool = False, **kwargs: Any) -> Any:
        paths = [self._storage.path(FILE)] if path == PLOTLY else []
        return paths if find_all else (paths[0] if paths else [])

    def list(self, ignore_patterns: Iterable[str] | None) -> Iterable[tuple[str, FileSystemStorage]]:
        yield FILE, self._storage

"""Lets collectstatic find plotly's JavaScript in the installed package: one version, nothing vendored."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import plotly
from django.contrib.staticfiles.finders import BaseFinder
from django.core.checks import CheckMessage
from django.core.files.storage import FileSystemStorage

FOLDER, FILE = "plotly", "plotly.min.js"


class PlotlyFinder(BaseFinder):
    """Finds `plotly/plotly.min.js` and nothing else of the package."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._storage = FileSystemStorage(location=str(Path(plotly.__file__).parent / "package_data"))
        # Where collectstatic puts what it finds here.
        self._storage.prefix = FOLDER  # type: ignore[attr-defined]

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        return []

    def find(self, path: str, find_all: bool = False, **kwargs: Any) -> Any:
        found = [self._storage.path(FILE)] if path == f"{FOLDER}/{FILE}" else []
        return found if find_all else (found[0] if found else [])

    def list(self, ignore_patterns: Iterable[str] | None) -> Iterable[tuple[str, FileSystemStorage]]:
        yield FILE, self._storage

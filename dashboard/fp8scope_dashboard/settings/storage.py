"""Storage of collected static files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any, Final

import brotli
from django.core.files.base import ContentFile
from django.core.files.storage import Storage
from whitenoise.compress import Compressor  # type: ignore[import-untyped]
from whitenoise.storage import CompressedManifestStaticFilesStorage  # type: ignore[import-untyped]

# A static import as our modules write it, and what replaces it.
IMPORT = (
    r"""(?m)^(?P<matched>import (?P<names>\{[^}]*\}) from "(?P<url>\./[^"]+)";)""",
    """import %(names)s from "%(url)s";""",
)
STYLE_IMPORT: Final = re.compile(rb'^@import "/static/pages/css/([\w.]+)";\n', re.MULTILINE)
# From 0 to 11. The highest saves 7 % more of plotly's script, and takes twenty times as long.
BROTLI_QUALITY: Final = 9


class FastCompressor(Compressor):  # type: ignore[misc]
    """Brotli of a quality that takes a fraction of a second."""

    @staticmethod
    def compress_brotli(data: bytes) -> bytes:
        compressed: bytes = brotli.compress(data, quality=BROTLI_QUALITY)
        return compressed


class StaticFiles(CompressedManifestStaticFilesStorage):  # type: ignore[misc]
    """Hashed names, gzip and Brotli.

    Style sheets are stored with what they import, so that the browser asks for one file.
    """

    # Our modules import each other by their hashed names too. Django's own setting for this also reads the
    # modules of other packages, some of which import what is not there.
    patterns = (*CompressedManifestStaticFilesStorage.patterns, ("pages/js/*.js", (IMPORT,)))

    def create_compressor(self, **options: Any) -> Compressor:
        return FastCompressor(**options)

    def post_process(
        self, paths: dict[str, tuple[Storage, str]], dry_run: bool = False, **options: Any
    ) -> Iterator[Any]:
        changed = {
            name: (_Changed(storage, _change_of(name)), path) for name, (storage, path) in paths.items()
        }
        yield from super().post_process(changed, dry_run, **options)


class _Changed:
    """The files of a storage, changed when they are read: their hashes are those of the changed files."""

    def __init__(self, storage: Storage, change: Callable[[Storage, str, bytes], bytes] | None) -> None:
        self._storage, self._change = storage, change

    def open(self, path: str) -> Any:
        file = self._storage.open(path)
        if self._change is None:
            return file
        with file:
            return ContentFile(self._change(self._storage, path, file.read()))


def _change_of(name: str) -> Callable[[Storage, str, bytes], bytes] | None:
    return with_imports if name.startswith("pages/css/") else None


def with_imports(storage: Storage, path: str, style: bytes) -> bytes:
    """A style sheet with the files of its folder that it imports, in their places."""

    def content_of(match: re.Match[bytes]) -> bytes:
        imported = str(PurePosixPath(path).with_name(match[1].decode()))
        with storage.open(imported) as file:
            return with_imports(storage, imported, file.read())

    return STYLE_IMPORT.sub(content_of, style)

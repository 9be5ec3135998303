"""Storage of collected static files."""

from typing import Any

from whitenoise.compress import Compressor  # type: ignore[import-untyped]
from whitenoise.storage import CompressedManifestStaticFilesStorage  # type: ignore[import-untyped]


class StaticFiles(CompressedManifestStaticFilesStorage):  # type: ignore[misc]
    """Hashed names and gzip. Not Brotli, which delays the first start by ten seconds if installed."""

    def create_compressor(self, **options: Any) -> Compressor:
        return Compressor(use_brotli=False, **options)

"""How collected static files are kept."""

from typing import Any

from whitenoise.compress import Compressor  # type: ignore[import-untyped]
from whitenoise.storage import CompressedManifestStaticFilesStorage  # type: ignore[import-untyped]


class StaticFiles(CompressedManifestStaticFilesStorage):  # type: ignore[misc]
    """Hashed names and gzip. No Brotli: where it is installed it holds up the first start by ten seconds."""

    def create_compressor(self, **options: Any) -> Compressor:
        return Compressor(use_brotli=False, **options)

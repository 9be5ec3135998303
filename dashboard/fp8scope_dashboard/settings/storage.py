"""Storage of collected static files."""

from typing import Any

from whitenoise.compress import Compressor  # type: ignore[import-untyped]
from whitenoise.storage import CompressedManifestStaticFilesStorage  # type: ignore[import-untyped]

# A static import as our modules write it, and what replaces it.
IMPORT = (
    r"""(?m)^(?P<matched>import (?P<names>\{[^}]*\}) from "(?P<url>\./[^"]+)";)""",
    """import %(names)s from "%(url)s";""",
)


class StaticFiles(CompressedManifestStaticFilesStorage):  # type: ignore[misc]
    """Hashed names and gzip. Not Brotli, which delays the first start by ten seconds if installed."""

    # Our modules import each other by their hashed names too. Django's own setting for this also reads the
    # modules of other packages, some of which import what is not there.
    patterns = (*CompressedManifestStaticFilesStorage.patterns, ("pages/js/*.js", (IMPORT,)))

    def create_compressor(self, **options: Any) -> Compressor:
        return Compressor(use_brotli=False, **options)

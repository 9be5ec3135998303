"""Bounds of an import: an uploaded file is the input of somebody else."""

import os
from typing import Final

from fp8scope_dashboard.wire.limits import MIB, REQUEST_BYTES

# The rest of a request's body is for the form.
MAX_BYTES: Final = REQUEST_BYTES - MIB
MAX_FILES: Final = 50
MAX_NAME: Final = 120
"""Characters of a file's name."""
CHUNK_BYTES: Final = 4 * MIB
MAX_WAITING: Final = 5
"""Imports of a project that are not over."""
KEPT_JOBS: Final = 50
"""Imports of a project whose outcome is kept."""

MEMORY_BYTES: Final = int(os.environ.get("FP8SCOPE_IMPORT_MEMORY_MIB") or 3072) * MIB
"""Address space of the importer."""
# Below the time limit of Celery's tasks, so that the job ends the importer, and says so.
SECONDS: Final = int(os.environ.get("FP8SCOPE_IMPORT_SECONDS") or 480)
UNPACKED_BYTES: Final = 1024 * MIB
MAX_ENTRIES: Final = 10_000
"""Entries of an archive; of those folders that lie in each other, MAX_FOLDERS."""
MAX_FOLDERS: Final = 8

MAX_LINE: Final = 2_000
"""Characters of a line of the importer's output."""
MAX_RESULTS: Final = 1_000
MAX_SENTENCES: Final = 20
"""Problems and notes of an import."""

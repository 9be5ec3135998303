"""Bounds of media. docs/media.md and docs/operating.md name them."""

import os
from typing import Final

from fp8scope_dashboard.wire.limits import MIB, REQUEST_BYTES

NAMES: Final = 64
ITEMS: Final = 20_000
ITEMS_AT_STEP: Final = 16
"""Of one name at one step, in one start of the training."""
TEXT_BYTES: Final = 64 * 1024
TABLE_ROWS: Final = 1_000
TABLE_COLUMNS: Final = 64
CELL_LENGTH: Final = 1_000
HEAD_BYTES: Final = 16 * 1024
"""Of the JSON in front of the content of a message."""
MAX_SIDE: Final = 16_384
MAX_PIXELS: Final = 64 * 1024 * 1024
"""Of an image, as its header says. A browser takes four bytes a pixel."""
CHUNK_BYTES: Final = 1 * MIB

# A message with its head must fit into a request.
FILE_BYTES: Final = min(int(os.environ.get("FP8SCOPE_MEDIA_FILE_MIB") or 8) * MIB, REQUEST_BYTES - HEAD_BYTES)
RUN_BYTES: Final = int(os.environ.get("FP8SCOPE_MEDIA_RUN_MIB") or 256) * MIB
PROJECT_BYTES: Final = int(os.environ.get("FP8SCOPE_MEDIA_PROJECT_MIB") or 2_048) * MIB

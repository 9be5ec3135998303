"""Limits on requests. docs/wire.md documents the first group for clients."""

import os
from typing import Final

MIB: Final = 1024 * 1024

REQUEST_BYTES: Final = 32 * MIB
DECOMPRESSED_BYTES: Final = 256 * MIB
ROWS: Final = 100_000
SCALARS: Final = 2_000
STATISTICS: Final = 32
TENSORS: Final = 20_000
EVALUATION_ITEMS: Final = 100_000
CONSOLE_LINES: Final = 1_000
CONSOLE_LINE_LENGTH: Final = 4_000

# Far beyond what a regular client sends.
SCHEMA_BYTES: Final = 1 * MIB
RECORD_BATCHES: Final = 1_000
TENSORS_PER_REQUEST: Final = 20_000
MAX_INT: Final = 2**63 - 1
# Of a message: that of the next is stored, too.
MAX_SEQ: Final = MAX_INT - 1
# Of what a writer counts: those of all writers of a run add up to less than 2^63.
MAX_COUNT: Final = 2**47 - 1
# 1970-01-01 and 2200-01-01 in microseconds since 1970. Machines without a clock begin in 1970, and clients of
# MLflow give numbers such as the step as a time.
FIRST_TIME_US: Final = 0
LAST_TIME_US: Final = 7_258_118_400_000_000

# Decompressed bytes that one web process works on at a time; beyond it, requests get status 429.
BYTES_IN_FLIGHT: Final = int(os.environ.get("FP8SCOPE_INGEST_MIB") or 768) * MIB
SLOW_DOWN_SECONDS: Final = 1
UNAVAILABLE_SECONDS: Final = 2
STORAGE_FULL_SECONDS: Final = 15

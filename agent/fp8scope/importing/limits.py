"""Bounds on what is read from files: a file is the input of somebody else."""

from typing import Final

MIB: Final = 1 << 20
MAX_DOCUMENT: Final = 256 * MIB
"""Bytes of a file that is parsed as a whole, such as a results file in JSON."""
MAX_LINE: Final = 16 * MIB
"""Bytes of a line of JSONL, CSV or a log."""
MAX_RECORD: Final = 64 * MIB
"""Bytes of a binary record."""
MAX_SCALARS: Final = 2_000
"""Names of scalars of a run, as on the server."""
MAX_TENSORS: Final = 20_000
MAX_ITEMS: Final = 100_000
"""Items of an evaluation, as on the server."""
MAX_RUNS: Final = 10_000
"""Runs of a source."""
MAX_FILES: Final = 100_000
"""Files of a folder that are looked at."""
MAX_DEPTH: Final = 8
"""Nested mappings of a document, and folders below the one that is imported."""
MAX_ENTRIES: Final = 5_000
"""Entries of a configuration or summary."""
MAX_TEXT: Final = 8_000
"""Characters of a text in a configuration."""
MAX_SERIES_POINTS: Final = 20_000_000
"""Points of a run in a store that keeps each metric apart: they are in memory together."""
ROWS_OF_A_TABLE: Final = 16_384
CELLS_OF_A_TABLE: Final = 1 << 20
"""Values of a table; 8 MiB."""

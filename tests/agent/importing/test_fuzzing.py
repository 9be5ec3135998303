"""Damaged files are read as far as they go or refused with a reason: no other exception.

benchmarks/importing.py reads 100,000 of each format, and measures the memory.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from agent.helpers.fuzzed_files import fuzz
from agent.helpers.import_files import WRITERS


@pytest.mark.parametrize("name", WRITERS)
def test_it_works(name: str, tmp_path: Path) -> None:
    result = fuzz(name, 150, zlib.crc32(name.encode()), tmp_path)
    assert result.failures == [], "\n".join(result.failures[:3])
    assert result.inputs == 150

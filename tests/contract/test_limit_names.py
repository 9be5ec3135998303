"""Limits have one vocabulary: MAX_ and MIN_."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("agent", "benchmarks", "dashboard", "kernels", "tests")
OTHER_WORDS = re.compile(r"(?<![A-Za-z0-9_])_?(?:MOST|LARGEST|LEAST|SMALLEST|FEWEST)_[A-Z0-9][A-Z0-9_]*\b")


def test_limits_are_called_max_and_min() -> None:
    others = {
        f"{path.relative_to(ROOT)}: {name}"
        for source in SOURCES
        for suffix in ("py", "js")
        for path in (ROOT / source).rglob(f"*.{suffix}")
        if "vendor" not in path.parts
        for name in OTHER_WORDS.findall(path.read_text())
    }
    assert others == set()

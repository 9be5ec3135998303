"""docs/benchmarks.md is the table of benchmarks/results.json, and says what was run."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.code_blocks import ROOT


@pytest.fixture
def table() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_table", ROOT / "tools" / "benchmark_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_works(table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark's lines become a table; one that fails keeps what there was."""
    benchmarks = tmp_path / "benchmarks"
    benchmarks.mkdir()
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "benchmarks.md"
    page.write_text("# Benchmarks\n\nWords.\n\n" + table.MARK)
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(table, "RESULTS", benchmarks / "results.json")
    monkeypatch.setattr(table, "PAGE", page)
    program = '"""Measures something.\n\nMore."""\nimport json, sys\nprint("a line of words")\n'
    program += (
        'line = {"benchmark": "some", "ratio": 1.23456, "p95": {"a": 12345.6}, "options": sys.argv[1:]}\n'
    )
    program += "print(json.dumps(line))\n"
    (benchmarks / "some.py").write_text(program)
    assert table.main(["some", "--", "--seconds", "8"]) == 0
    text = page.read_text()
    assert text.startswith("# Benchmarks\n\nWords.\n") and "Measures something.\n" in text
    assert "| `ratio` | 1.23 |\n| `p95.a` | 12,346 |\n" in text
    assert "`python benchmarks/some.py --seconds 8`: " in text
    (benchmarks / "some.py").write_text("raise SystemExit('no')")
    assert table.main(["some"]) == 1
    assert json.loads((benchmarks / "results.json").read_text())["some"]["lines"][0]["ratio"] == 1.23456


def test_several_lines_are_rows(table: Any) -> None:
    result = {"date": "2026-01-01", "commit": "abc", "machine": "2 cores", "options": ""}
    lines = [{"case": "a", "ms": 1.5}, {"case": "b|c", "ms": None, "n": 3}]
    text = table.section("ingest", {**result, "lines": lines})
    assert text.endswith("| `case` | `ms` | `n` |\n|---|---|---|\n| a | 1.5 |  |\n| b\\|c |  | 3 |\n")


def test_the_page_is_what_the_results_say(table: Any) -> None:
    results = json.loads(table.RESULTS.read_text())
    assert results and all((ROOT / "benchmarks" / f"{name}.py").exists() for name in results)
    before = table.PAGE.read_text()
    table.write_page(results)
    assert table.PAGE.read_text() == before
    assert re.findall(r"^## (\w+)$", before, re.MULTILINE) == sorted(results)

"""Tests import helpers only from helpers/ folders, never from a conftest.py or another test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]


def imported_modules(source: str) -> Iterator[str]:
    """Dotted paths of all modules and names that the source imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_test(module: str) -> bool:
    """Whether a dotted path names a test file or conftest of this folder, or something in it."""
    parts = module.split(".")
    return any(
        parts[length - 1].startswith(("test_", "conftest"))
        and TESTS.joinpath(*parts[:length]).with_suffix(".py").exists()
        for length in range(1, len(parts) + 1)
    )


def test_it_works() -> None:
    imports_of_tests = [
        f"{file.relative_to(TESTS)} imports {module}"
        for file in sorted(TESTS.rglob("*.py"))
        for module in imported_modules(file.read_text())
        if is_test(module)
    ]
    assert imports_of_tests == []


def test_detects_an_import_from_a_test() -> None:
    for source in (
        "from contract.test_histograms import counts",
        "def f():\n    import contract.test_histograms",
        "from contract import test_histograms",
        "import conftest",
    ):
        assert any(map(is_test, imported_modules(source))), source
    for source in ("from contract.helpers.wire_client import WireClient", "from torch.testing import test_x"):
        assert not any(map(is_test, imported_modules(source))), source


def test_helpers_are_not_collected_as_tests() -> None:
    assert [str(file) for file in TESTS.rglob("helpers/**/*.py") if file.name.startswith("test_")] == []

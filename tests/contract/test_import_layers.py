"""Each package imports only what the table in ARCHITECTURE.md allows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "fp8scope_kernels": ROOT / "kernels" / "fp8scope_kernels",
    "fp8scope": ROOT / "agent" / "fp8scope",
    "fp8scope_dashboard": ROOT / "dashboard" / "fp8scope_dashboard",
}
# `fp8scope demo` trains models and starts a dashboard. Its training code is in the agent's package and the
# dashboard starts it as a process, so it follows the rules, too.
FORBIDDEN = {
    "fp8scope_kernels": {"fp8scope", "fp8scope_dashboard", "django", "numpy", "pyarrow", "pandas", "urllib3"},
    "fp8scope": {"fp8scope_dashboard", "django", "celery", "redis", "psycopg", "ninja", "plotly"},
    "fp8scope_dashboard": {"fp8scope", "fp8scope_kernels", "torch", "triton"},
}


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Line and top-level package of every import, anywhere in the file."""
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            yield node.lineno, (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value.partition(".")[0]


# Imported by the function that returns its figures, if the reader has installed it.
OPTIONAL = {ROOT / "agent/fp8scope/client/figures.py": {"plotly"}}


def violations(package: str, folder: Path) -> list[str]:
    files = sorted(folder.rglob("*.py"))
    assert files, f"no files below {folder}"
    return [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in files
        for line, name in imports(file)
        if name in FORBIDDEN[package] - OPTIONAL.get(file, set())
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_it_works(package: str) -> None:
    assert violations(package, PACKAGES[package]) == []


def test_kernels_import_torch_and_the_standard_library_only() -> None:
    import sys

    allowed = {"torch", "triton", "fp8scope_kernels", *sys.stdlib_module_names}
    # An optional package, imported by the function that writes its files.
    extra = {"serving_checkpoint.py": {"safetensors"}}
    for file in PACKAGES["fp8scope_kernels"].rglob("*.py"):
        assert {name for _, name in imports(file)} <= allowed | extra.get(file.name, set()), file


def test_detects_a_violation(tmp_path: Path) -> None:
    for statement in (
        "import torch.nn",
        "def f():\n    from torch import nn",
        "importlib.import_module('torch')",
    ):
        file = tmp_path / "module.py"
        file.write_text(statement)
        assert [name for _, name in imports(file)] == ["torch"]

"""Behind a pooler with transaction pooling, what outlives a transaction belongs to any connection."""

from __future__ import annotations

import ast
from pathlib import Path

DASHBOARD = Path(__file__).parents[2] / "dashboard"
SESSION_LOCKS = ("pg_advisory_lock", "pg_try_advisory_lock", "pg_advisory_unlock")


def sources() -> list[Path]:
    return [path for path in DASHBOARD.rglob("*.py") if "migrations" not in path.parts]


def cursors_without_transaction(tree: ast.AST, is_inside: bool = False) -> list[int]:
    """The lines that read with a cursor of the server, outside of a `with transaction.atomic()`."""
    lines = []
    for node in ast.iter_child_nodes(tree):
        begins = isinstance(node, ast.With) and any("atomic" in ast.unparse(item) for item in node.items)
        if isinstance(node, ast.Attribute) and node.attr == "iterator" and not is_inside:
            lines.append(node.lineno)
        lines += cursors_without_transaction(node, is_inside or begins)
    return lines


def test_it_works() -> None:
    """The next rows of a cursor are read through the same connection only within a transaction."""
    lines = {
        f"{path.name}:{line}"
        for path in sources()
        if ".iterator(" in (text := path.read_text())
        for line in cursors_without_transaction(ast.parse(text))
    }
    assert lines == set()


def test_locks_belong_to_transactions() -> None:
    texts = {path.name: path.read_text() for path in sources()}
    assert [name for name, text in texts.items() if any(f"{lock}(" in text for lock in SESSION_LOCKS)] == []

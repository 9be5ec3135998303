"""A name stands for one class, says what it holds, and docstrings begin with a noun or a verb."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("agent", "kernels", "dashboard")
# Nested classes that a framework looks up by their name.
OF_FRAMEWORKS: Final = {"Meta", "Migration", "Command", "Config", "Media"}
# The agent's public names, and models and schemas, whose names are stored or published, may be equal.
SHARED: Final = {
    "Alert": "what the script gets, and what the wire carries",
    "Fp8scopeCallback": "of Lightning, and of Transformers",
    "Fp8scopeLogger": "of each framework that has loggers",
    "Quantized": "of the backends, which nothing uses together",
    "Receipt": "the model, and what the wire carries",
    "Run": "of the agent, and of the dashboard",
}
MAX_POSITIONAL: Final = 5
QUESTION: Final = re.compile(r"(What|Whether|Who|How|Where|When|Which|Why)\b")
VAGUE: Final = {"found", "one", "each", "known", "kept", "place"}


@cache
def modules() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if "migrations" not in path.parts
    }


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for path, module in modules().items():
        for node in ast.walk(module):
            yield path, node


def test_a_class_name_stands_for_one_class() -> None:
    places = defaultdict(set)
    for path, node in nodes():
        if isinstance(node, ast.ClassDef) and node.name not in OF_FRAMEWORKS:
            places[node.name].add(path)
    assert len(places) > 500
    assert {name: paths for name, paths in places.items() if len(paths) > 1 and name not in SHARED} == {}
    assert {name for name in SHARED if len(places[name]) < 2} == set()


def decorator(node: ast.ClassDef) -> str:
    """The decorator that makes a dataclass of it; empty if there is none."""
    return next((text for text in map(ast.unparse, node.decorator_list) if "dataclass" in text), "")


def test_the_fields_of_large_dataclasses_are_passed_by_name() -> None:
    positional = []
    for path, node in nodes():
        if isinstance(node, ast.ClassDef) and decorator(node) and "kw_only=True" not in decorator(node):
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            fields = [field for field in fields if "ClassVar" not in ast.unparse(field.annotation)]
            if len(fields) > MAX_POSITIONAL:
                positional.append(f"{path}: {node.name}")
    assert positional == []


def docstrings() -> Iterator[tuple[str, str]]:
    for path, node in nodes():
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield path, ast.get_docstring(node) or ""
        if isinstance(node, ast.Module | ast.ClassDef):
            for assignment, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(assignment, ast.Assign | ast.AnnAssign) and isinstance(text, ast.Expr):
                    value = text.value.value if isinstance(text.value, ast.Constant) else ""
                    yield path, value if isinstance(value, str) else ""


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    assert [f"{path}: {text.splitlines()[0]}" for path, text in docstrings() if QUESTION.match(text)] == []


def test_variables_are_named_for_what_they_hold() -> None:
    vague = []
    for path, node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            vague += [
                f"{path}:{node.lineno}: {argument.arg}" for argument in arguments if argument.arg in VAGUE
            ]
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
            vague.append(f"{path}:{node.lineno}: {node.id}")
    assert vague == []

"""Finds names at module level that are no settings, such as those that the training loop binds."""

import ast
import sys
import tokenize

from fp8scope.autolog.parsed_arguments import is_script_file

MAX_SOURCE_BYTES = 4 << 20


def rebound_names(path: str) -> set[str]:
    """Return the names of this Python file that a loop binds, or a function through `global`, and those that
    it imports from a library. Empty if the file cannot be read.
    """
    try:
        with tokenize.open(path) as file:
            source = file.read(MAX_SOURCE_BYTES)
        finder = _NameCollector()
        finder.visit(ast.parse(source))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return set()
    return finder.names


class _NameCollector(ast.NodeVisitor):
    """Collects the names. The methods are called by `ast.NodeVisitor`, for each kind of node."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._in_loop = False

    def visit_For(self, node: ast.For) -> None:
        self._visit_loop(node.target, *node.body)
        self._visit_all(node.iter, *node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self._visit_loop(node.test, *node.body)
        self._visit_all(*node.orelse)

    def _visit_loop(self, *nodes: ast.AST) -> None:
        before, self._in_loop = self._in_loop, True
        self._visit_all(*nodes)
        self._in_loop = before

    def _visit_all(self, *nodes: ast.AST) -> None:
        for node in nodes:
            self.visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if self._in_loop and not isinstance(node.ctx, ast.Load):
            self.names.add(node.id)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = sys.modules.get(node.module or "")
        path = str(getattr(module, "__file__", None) or "<unknown>")
        if not node.level and not is_script_file(path):
            self.names.update(alias.asname or alias.name for alias in node.names)

    def _visit_scope(self, node: ast.AST) -> None:
        """A function or class: of the names that it binds, only those that it declares `global` are meant."""
        inner = list(ast.walk(node))
        declared = {
            name for statement in inner if isinstance(statement, ast.Global) for name in statement.names
        }
        self.names |= declared & {
            statement.id
            for statement in inner
            if isinstance(statement, ast.Name) and not isinstance(statement.ctx, ast.Load)
        }

    def _visit_comprehension(self, node: ast.AST) -> None:
        """Its variables are its own; what it binds by `:=` is not."""
        for child in ast.walk(node):
            if isinstance(child, ast.NamedExpr):
                self.names.add(child.target.id)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _visit_scope
    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

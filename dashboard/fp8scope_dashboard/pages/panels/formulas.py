"""Formulas of metrics, such as `log(train/loss) - log(eval/loss)`: a parser and an evaluator of arrays.

A name is plain (`grad_norm`, `train/loss`) or in quotation marks (`"1st-loss"`). `a/b` and `a-b` without
spaces are the metrics of these names, if there are such; else, and with spaces, they divide and subtract.

    sum     = product (("+" | "-") product)*
    product = factor (("*" | "/") factor)*
    factor  = "-" factor | number | name | ("log" | "exp" | "abs") "(" sum ")" | "(" sum ")"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters, digits
from typing import Final

import numpy as np

from fp8scope_dashboard.statistics.arrays import Floats

MAX_LENGTH: Final = 500
MAX_DEPTH: Final = 30
FUNCTIONS: Final[Mapping[str, Callable[[Floats], Floats]]] = {"log": np.log, "exp": np.exp, "abs": np.abs}

_TOKEN: Final = re.compile(
    r"""\s*(?:
      (?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)
    | (?P<quoted>"[^"]*"|'[^']*')
    | (?P<name>[^\W\d][\w.:@]*(?:/[^\W\d][\w.:@]*)*)
    | (?P<sign>[-+*/()])
    )""",
    re.VERBOSE,
)

_PLAIN: Final = re.compile(r"[A-Za-z_][\w./-]*", re.ASCII)
_IN_NAMES: Final = frozenset(f"{ascii_letters}{digits}_./-")


class FormulaError(ValueError):
    """The formula is not understood; the message says why."""


@dataclass(frozen=True)
class Number:
    """A constant."""

    value: float


@dataclass(frozen=True)
class Metric:
    """The values of a logged scalar."""

    name: str


@dataclass(frozen=True)
class Call:
    """A function or an operator, and what it is applied to."""

    name: str
    arguments: tuple[Node, ...]


Node = Number | Metric | Call


@dataclass(frozen=True)
class _FormulaToken:
    kind: str
    text: str


def parse(text: str, logged: Collection[str]) -> Node:
    """The formula as a tree.

    Args:
        logged: the names of metrics, which decide what `a/b` means.

    Raises:
        FormulaError: it is empty, too long, too deep or no formula.
    """
    if not text.strip():
        raise FormulaError("The formula is empty.")
    if len(text) > MAX_LENGTH:
        raise FormulaError(f"A formula has at most {MAX_LENGTH} characters.")
    parser = _Parser(_tokens(text, logged))
    node = parser.sum(0)
    if parser.next is not None:
        raise FormulaError(f"There is “{parser.next.text}” where a sign or the end should be.")
    return node


def metrics_of(node: Node) -> set[str]:
    """The names of the metrics in a formula."""
    if isinstance(node, Metric):
        return {node.name}
    return {name for part in node.arguments for name in metrics_of(part)} if isinstance(node, Call) else set()


def evaluate(node: Node, values: Mapping[str, Floats]) -> Floats:
    """The values of a formula, float64[N], from those of its metrics at the same N steps.

    A division by 0 and a logarithm of 0 are infinite, and that of a negative number is NaN.
    """
    with np.errstate(all="ignore"):
        return np.asarray(_value(node, values), np.float64)


def _value(node: Node, values: Mapping[str, Floats]) -> Floats:
    if isinstance(node, Number):
        return np.asarray(node.value)
    if isinstance(node, Metric):
        return values[node.name]
    parts = [_value(part, values) for part in node.arguments]
    if node.name in FUNCTIONS:
        return FUNCTIONS[node.name](parts[0])
    if len(parts) == 1:
        return -parts[0]
    left, right = parts
    match node.name:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    return left / right


def _tokens(text: str, logged: Collection[str]) -> list[_FormulaToken]:
    tokens: list[_FormulaToken] = []
    at = 0
    text = text.rstrip()
    # Of names that begin alike, the longest counts.
    names = sorted((name for name in logged if _PLAIN.fullmatch(name)), key=len, reverse=True)
    while at < len(text):
        if name := _name_at(text, at, names):
            tokens.append(_FormulaToken("name", name))
            at += len(name)
            continue
        match = _TOKEN.match(text, at)
        if match is None:
            raise FormulaError(
                f"“{text[at:].strip()[:20]}” is not understood. Write other names in quotation marks."
            )
        kind = match.lastgroup or ""
        word = match[kind]
        if kind == "name":
            tokens += _names(word, logged)
        else:
            tokens.append(
                _FormulaToken("name" if kind == "quoted" else kind, word[1:-1] if kind == "quoted" else word)
            )
        at = match.end()
    return tokens


def _name_at(text: str, at: int, names: Sequence[str]) -> str:
    """The metric whose name stands at this position; empty for none, and for a part of a longer word."""
    if at and text[at - 1] in _IN_NAMES:
        return ""
    ends = ((name, text[at + len(name) : at + len(name) + 1]) for name in names if text.startswith(name, at))
    return next((name for name, follows in ends if not follows or follows not in _IN_NAMES), "")


def _names(word: str, logged: Collection[str]) -> list[_FormulaToken]:
    """One name, or several that are divided: the longest that were logged, if they are all of it."""
    parts = word.split("/")
    names: list[str] = []
    while parts:
        lengths = (end for end in range(len(parts), 0, -1) if "/".join(parts[:end]) in logged)
        end = next(lengths, 0)
        if not end:
            return [_FormulaToken("name", word)]
        names.append("/".join(parts[:end]))
        parts = parts[end:]
    tokens = [_FormulaToken("name", names[0])]
    for name in names[1:]:
        tokens += [_FormulaToken("sign", "/"), _FormulaToken("name", name)]
    return tokens


class _Parser:
    """Recursive descent over the tokens."""

    def __init__(self, tokens: list[_FormulaToken]) -> None:
        self._tokens = tokens
        self._at = 0

    @property
    def next(self) -> _FormulaToken | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _takes(self, *signs: str) -> str:
        """The sign that comes next, which is taken, if it is one of these."""
        token = self.next
        if token is None or token.kind != "sign" or token.text not in signs:
            return ""
        self._at += 1
        return token.text

    def sum(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise FormulaError(f"The formula has more than {MAX_DEPTH} levels.")
        node = self._product(depth)
        while sign := self._takes("+", "-"):
            node = Call(sign, (node, self._product(depth)))
        return node

    def _product(self, depth: int) -> Node:
        node = self._factor(depth)
        while sign := self._takes("*", "/"):
            node = Call(sign, (node, self._factor(depth)))
        return node

    def _factor(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise FormulaError(f"The formula has more than {MAX_DEPTH} levels.")
        if self._takes("-"):
            return Call("-", (self._factor(depth + 1),))
        if self._takes("("):
            return self._enclosed(depth)
        token = self.next
        if token is None or token.kind == "sign":
            where = "at the end" if token is None else f"before “{token.text}”"
            raise FormulaError(f"A number, a metric or a bracket is missing {where}.")
        self._at += 1
        if token.kind == "number":
            return Number(float(token.text))
        if token.text in FUNCTIONS and self._takes("("):
            return Call(token.text, (self._enclosed(depth),))
        return Metric(token.text)

    def _enclosed(self, depth: int) -> Node:
        node = self.sum(depth + 1)
        if not self._takes(")"):
            raise FormulaError("A closing bracket is missing.")
        return node

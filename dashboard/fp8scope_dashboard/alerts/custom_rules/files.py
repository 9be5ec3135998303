"""Rules as code: the YAML file of `fp8scope rules`, with errors that name the line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.alerts.custom_rules.documents import Draft, Key, RuleDocumentError, document_of, parse
from fp8scope_dashboard.alerts.custom_rules.store import MAX_RULES
from fp8scope_dashboard.alerts.models import Rule

VERSION: Final = 1
MAX_FILE: Final = 256 * 1024
DEEPEST: Final = 8
# A rule has at most some 50 values with its keys; a list of MAX_RULES is far below this.
MAX_NODES: Final = 50_000
HEAD: Final = """\
# The alert rules of an fp8scope project. Change them, then: fp8scope rules apply FILE
# Rules of your own are found by their name, built-in ones by their kind. docs/alerts.md has the fields.
"""


# libyaml's parser where PyYAML has it: the one in pure Python takes seconds for a file of 256 kB.
_Parser: Final[type[Any]] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Parser):  # type: ignore[misc]
    """Reads `1e-3` as a number, as YAML 1.2 does. YAML 1.1 asks for a point."""


class _Dumper(yaml.SafeDumper):
    """Puts quotes around texts that `_Loader` would read as numbers."""


for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+\Z"),
        list("-+0123456789"),
    )


class RuleFileError(ValueError):
    """A file is invalid; the message begins with the line."""


def export(rules: Sequence[Rule]) -> str:
    """The file of these rules."""
    content = {"version": VERSION, "rules": [document_of(rule) for rule in rules]}
    return HEAD + yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def read(project: Project, text: str) -> list[Draft]:
    """The rules of a file.

    Raises:
        RuleFileError: if it is no YAML, too large, or a rule is invalid.
    """
    if len(text) > MAX_FILE:
        raise RuleFileError(f"The file has more than {MAX_FILE // 1024} kB.")
    root, content = _load(text)
    if not isinstance(content, dict):
        raise RuleFileError("line 1: The file must have the keys version and rules.")
    for key in content:
        if key not in ("version", "rules"):
            raise _error(root, (key,), f"{str(key)[:40]}: unknown; known here: version, rules.")
    if content.get("version") != VERSION or isinstance(content.get("version"), bool):
        raise _error(root, ("version",), f"version: must be {VERSION}.")
    documents = content.get("rules")
    if not isinstance(documents, list) or len(documents) > MAX_RULES:
        raise _error(root, ("rules",), f"rules: must be a list of at most {MAX_RULES} rules.")
    drafts: dict[tuple[str, str], Draft] = {}
    for number, document in enumerate(documents):
        try:
            draft = parse(project, document)
        except RuleDocumentError as error:
            raise _error(root, ("rules", number, *error.key), str(error)) from None
        if draft.key in drafts:
            raise _error(root, ("rules", number), "This rule is in the file twice.")
        drafts[draft.key] = draft
    return list(drafts.values())


def _load(text: str) -> tuple[Node | None, Any]:
    """The tree of the file, for line numbers, and its content."""
    try:
        _bound(text)
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            _check(root)
            return root, None if root is None else loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(filter(None, (error.context, error.problem)))
        raise RuleFileError(f"line {mark.line + 1 if mark else 1}: {problem}.") from None
    except RuleFileError:
        raise
    # Of numbers that Python does not convert.
    except (yaml.YAMLError, ValueError) as error:
        raise RuleFileError(f"line 1: The file is not valid YAML ({type(error).__name__}).") from None


def _bound(text: str) -> None:
    """Refuse a file whose tree would be deep or large, before a tree is built.

    The first alias ends it: with aliases a small file has a large tree.
    """
    depth = nodes = 0
    for event in yaml.parse(text, Loader=_Parser):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise RuleFileError(f"{_line(event)}: Anchors and aliases are not supported. Repeat the value.")
        nodes += isinstance(event, yaml.NodeEvent)
        if nodes > MAX_NODES:
            raise RuleFileError(f"{_line(event)}: The file has more than {MAX_NODES:,} values.")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEEPEST:
            raise RuleFileError(f"{_line(event)}: The file is nested too deeply.")


def _check(node: Node | None) -> None:
    if node is None:
        return
    if node.tag not in SAFE_TAGS:
        raise RuleFileError(f"{_line(node)}: {_refusal(node)}")
    if isinstance(node, SequenceNode):
        for child in node.value:
            _check(child)
    elif isinstance(node, MappingNode):
        names = set()
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                raise RuleFileError(f"{_line(key)}: A key must be a word.")
            if key.value in names:
                raise RuleFileError(f"{_line(key)}: {key.value[:40]} is there twice.")
            names.add(key.value)
            _check(value)


YAML_TAG: Final = "tag:yaml.org,2002:"
SAFE_TAGS: Final = tuple(
    f"{YAML_TAG}{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map")
)


def _refusal(node: Node) -> str:
    if isinstance(node, ScalarNode) and node.tag == f"{YAML_TAG}timestamp":
        return f'Put the date in quotes: "{node.value[:40]}".'
    return f"The tag {node.tag.replace(YAML_TAG, '!!')[:80]} is not supported. Write the value without it."


def _error(root: Node | None, key: Key, message: str) -> RuleFileError:
    """An error at the deepest part of `key` that is in the file."""
    node, line = root, root
    for part in key:
        child: tuple[Any, Any] | None = None
        if isinstance(node, MappingNode):
            child = next(((name, value) for name, value in node.value if name.value == str(part)), None)
        elif isinstance(node, SequenceNode) and isinstance(part, int) and part < len(node.value):
            child = (node.value[part], node.value[part])
        if child is None:
            break
        line, node = child
    return RuleFileError(f"{_line(line)}: {message}")


def _line(node: Node | yaml.Event | None) -> str:
    mark = None if node is None else node.start_mark
    return f"line {1 if mark is None else mark.line + 1}"

"""Pages of the documentation's site that are made of other files; a hook of mkdocs.yml.

The first page is README.md. `reference/` has the public names of the packages, from their docstrings, and the
endpoints of the server, from its OpenAPI document. Links that lead out of docs/ lead to the repository.
"""

import ast
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "fp8scope": ROOT / "agent" / "fp8scope",
    "fp8scope_kernels": ROOT / "kernels" / "fp8scope_kernels",
}
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])|(?<=src=\")([^\":]+)(?=\")|(?<=srcset=\")([^\":]+)(?=\")")
METHODS = ("get", "put", "post", "patch", "delete")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made; called once by MkDocs."""
    made = {
        "index.md": (ROOT / "README.md").read_text(),
        "reference/index.md": INTRODUCTION,
        "reference/http.md": endpoints(openapi()),
        **{f"reference/{package}.md": public_names(package) for package in PACKAGES},
    }
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to other folders of the repository to its web page; called for each page by MkDocs."""
    folder = "" if page.file.src_uri == "index.md" else posixpath.dirname(f"docs/{page.file.src_uri}")

    def target(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[0]))
        if path.startswith("docs/"):
            return posixpath.relpath(path, folder or "docs") if folder else path.removeprefix("docs/")
        return f"{config.extra['repository']}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"

    # Not in code, where brackets mean something else.
    parts = re.split(r"(^```.*?^```$|`[^`\n]+`)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if index % 2 else LINK.sub(target, part) for index, part in enumerate(parts))


INTRODUCTION = """# Reference

* [Python, agent](fp8scope.md): what training scripts and programs that read use.
* [Python, kernels](fp8scope_kernels.md): FP8 layers, recipes, casts and counters.
* [HTTP](http.md): every endpoint of the server, from its OpenAPI document. A server shows the same below
  `/api/v1/docs`.
* [The reading API in words](../api.md) and [the wire protocol](../wire.md) say what the fields mean.
"""


def public_names(package: str) -> str:
    """Return a page with every name of a package's `__all__`, for mkdocstrings."""
    folder = PACKAGES[package]
    tree = ast.parse((folder / "__init__.py").read_text())
    (names,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return f"# `{package}`\n\n" + "\n".join(f"::: {package}.{name}\n" for name in names)


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document that the server has at `/api/v1/openapi.json`."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "fp8scope_dashboard.settings.test")
    import django  # Only when the site is built: it reads the settings.

    django.setup()
    from fp8scope_dashboard.api.root import api

    return dict(api.get_openapi_schema())


def endpoints(document: dict[str, Any]) -> str:
    """Return the page of all endpoints: parameters, bodies, answers and errors."""
    lines = [
        "# HTTP",
        "",
        "Every request has the header `Authorization: Bearer fp8s_...`, a token of a project.",
        "",
    ]
    for path, item in sorted(document["paths"].items()):
        for method in METHODS:
            if operation := item.get(method):
                lines += [f"## `{method.upper()} {path}`", "", *_operation(operation)]
    lines += ["## Bodies", ""]
    for name, schema in sorted(document.get("components", {}).get("schemas", {}).items()):
        lines += [f"### {name}", "", schema.get("description", ""), "", *_fields(schema)]
    return "\n".join(lines)


def _operation(operation: dict[str, Any]) -> list[str]:
    lines = [operation.get("description", operation.get("summary", "")), ""]
    if parameters := operation.get("parameters"):
        lines += ["| parameter | in | type | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{each['name']}` | {each['in']} | {_type(each['schema'])} | {_cell(each)} |"
            for each in parameters
        ]
        lines.append("")
    if body := operation.get("requestBody"):
        lines += [f"Body: {_bodies(body['content'])}", ""]
    lines += ["| status | answer |", "|---|---|"]
    for status, answer in sorted(operation["responses"].items(), key=lambda pair: str(pair[0])):
        content = _bodies(answer["content"]) if answer.get("content") else ""
        lines.append(f"| {status} | {' '.join(filter(None, (_cell(answer), content)))} |")
    return [*lines, ""]


def _fields(schema: dict[str, Any]) -> list[str]:
    properties = schema.get("properties")
    if not properties:
        return [_type(schema), ""]
    required = set(schema.get("required", ()))
    rows = [
        f"| `{name}`{'' if name in required else ' (optional)'} | {_type(kind)} | {_cell(kind)} |"
        for name, kind in properties.items()
    ]
    return ["| field | type | meaning |", "|---|---|---|", *rows, ""]


def _bodies(content: dict[str, Any]) -> str:
    return ", ".join(f"`{kind}`: {_type(entry.get('schema', {}))}" for kind, entry in content.items())


def _type(schema: dict[str, Any]) -> str:
    """Return a schema's type in words; that of a named one links to its fields."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_type(each) for each in schema[key]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    extra = schema.get("additionalProperties")
    if schema.get("type") == "object" and isinstance(extra, dict):
        return f"mapping of {_type(extra)}"
    return str(schema.get("format") or schema.get("type") or "any value")


def _cell(entry: dict[str, Any]) -> str:
    return " ".join(str(entry.get("description", "")).split()).replace("|", "\\|")

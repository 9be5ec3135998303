"""Violations of WCAG 2.2 AA on a page, found by axe-core."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from playwright.sync_api import Page

OPTIONS: Final[dict[str, Any]] = {
    "resultTypes": ["violations"],
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"],
}
MOST_SHOWN = 4


def violations(page: Page) -> list[str]:
    """One line for each violated rule, with the first elements that violate it."""
    # The package has no types.
    axe = import_module("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page, options=OPTIONS).response["violations"]
    return [
        f"{rule['id']}: {rule['help']}: "
        + "; ".join(" ".join(map(str, node["target"])) for node in rule["nodes"][:MOST_SHOWN])
        for rule in found
    ]

"""Violations of WCAG 2.2 AA on a page, found by axe-core."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from playwright.sync_api import Page

EVERY_RULE: Final[dict[str, Any]] = {
    "type": "tag",
    "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"],
}
RUN: Final = "({within, options}) => axe.run(within, options).then(({violations}) => violations)"
MAX_SHOWN = 4


def violations(page: Page, within: str = "html") -> list[str]:
    """One line for each violated rule, with the first elements that violate it.

    Args:
        within: the selector of the part that is examined.
    """
    if not page.evaluate("'axe' in window"):
        # The package has no types.
        page.evaluate(import_module("axe_playwright_python.base").AXE_SCRIPT)
    options = {"resultTypes": ["violations"], "runOnly": EVERY_RULE}
    found = page.evaluate(RUN, {"within": within, "options": options})
    return [
        f"{rule['id']}: {rule['help']}: "
        + "; ".join(" ".join(map(str, node["target"])) for node in rule["nodes"][:MAX_SHOWN])
        for rule in found
    ]

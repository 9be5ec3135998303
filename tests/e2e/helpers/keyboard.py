"""What a person meets who moves through a page with the Tab key."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

# A field that is hidden behind its label shows the focus there.
FOCUSED = """() => {
    const tag = document.activeElement;
    const stays = tag === window.lastFocused;
    window.lastFocused = tag;
    if (!tag || tag === document.body) return "";
    const shown = [tag, tag.closest("label"), tag.nextElementSibling].filter(Boolean).map((each) => {
        const box = each.getBoundingClientRect();
        const style = getComputedStyle(each);
        const isOutlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
        const isMarked = isOutlined || style.boxShadow !== "none";
        return { isVisible: box.width > 1 && box.height > 1, isMarked };
    });
    const name = tag.outerHTML.slice(0, 100);
    if (stays) return `keeps the focus: ${name}`;
    if (!shown.some((each) => each.isVisible)) return `has the focus unseen: ${name}`;
    if (!shown.some((each) => each.isMarked)) return `does not show its focus: ${name}`;
    return "fine";
}"""

# A chart has no size until it is drawn.
NOTHING_LOADS = "() => !document.querySelector('.figure[data-state=loading]')"


def focus_problems(page: Page, steps: int) -> list[str]:
    """Press Tab so many times; returns elements that keep the focus, are not visible or do not show it."""
    problems: list[str] = []
    for _ in range(steps):
        page.keyboard.press("Tab")
        page.wait_for_function(NOTHING_LOADS)
        problem = page.evaluate(FOCUSED)
        if not problem:
            break
        if problem != "fine":
            problems.append(problem)
    return problems

"""Words that a page breaks, and controls that it does not name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

BROKEN_WORDS = """() => {
  const context = document.createElement("canvas").getContext("2d");
  return [...document.querySelectorAll(".scroll-x :is(th, td):not(.mono)")].flatMap(cell => {
    const style = getComputedStyle(cell);
    const inner = cell.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    context.font = style.font;
    const words = cell.innerText.split(/\\s+/);
    return inner > 1 ? words.filter(word => context.measureText(word).width > inner + 2) : [];
  });
}"""
UNNAMED_CONTROLS = """() => [
    ...document.querySelectorAll("a, button, input:not([type=hidden], [hidden]), select, summary, textarea")
].filter((tag) => !(tag.textContent.trim() || tag.getAttribute("aria-label") || tag.labels?.length))
    .map((tag) => tag.outerHTML.slice(0, 120))"""

CRAMPED = """() => {
  const isOutside = (tag) => {
    const box = tag.getBoundingClientRect();
    return box.width && (box.left < -1 || box.right > innerWidth + 1);
  };
  const scrolls = (tag) => tag && tag !== document.body
    && (["auto", "scroll"].includes(getComputedStyle(tag).overflowX) || scrolls(tag.parentElement));
  return [...document.querySelectorAll("a:not(.skip), button, input, select, summary")]
    .filter((tag) => isOutside(tag) && tag.checkVisibility() && !scrolls(tag))
    .map((tag) => tag.outerHTML.slice(0, 120));
}"""


def broken_words(page: Page) -> list[str]:
    """The words of table cells that are wider than their cell; names of tensors may be broken.

    Cells for screen readers alone are 1 px wide.
    """
    return list(page.evaluate(BROKEN_WORDS))


def unnamed_controls(page: Page) -> list[str]:
    """The beginnings of links, buttons and fields without a text or a label; Plotly's are its own."""
    return [html for html in page.evaluate(UNNAMED_CONTROLS) if "modebar" not in html]


def cramped_controls(page: Page) -> list[str]:
    """The beginnings of links, buttons and fields outside of the window that no scrolling leads to."""
    return list(page.evaluate(CRAMPED))

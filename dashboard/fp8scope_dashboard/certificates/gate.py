"""The outcome of a certificate for continuous integration: JUnit XML and Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from xml.etree import ElementTree

from fp8scope_dashboard.text.numbers import number, percent

TITLES: Final = {
    "equivalent": "FP8 is equivalent to BF16",
    "better": "FP8 is better than BF16",
    "worse": "FP8 is worse than BF16",
    "cannot_tell": "Cannot tell yet",
    "pending": "Not finished yet",
    "incomplete": "Only a part of the run was judged",
}


def title_of(claim: Mapping[str, Any]) -> str:
    """Return the verdict in a few words, with the margin that 'equivalent' was judged by."""
    title = TITLES.get(str(claim["verdict"]), str(claim["verdict"]))
    judged = claim.get("judged_margin")
    if claim["verdict"] == "equivalent" and judged is not None:
        nats = claim.get("margin_nats")
        times = judged / claim["margin"]
        title += f" within {amount(claim, judged) if nats is None else f'{number(nats * times)} nats'}"
    return title


def amount(claim: Mapping[str, Any], value: float) -> str:
    """Return a difference in the claim's unit."""
    return percent(value) if claim.get("unit") == "relative" else f"{number(value)} nats"


def facts_of(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the numbers of a certificate as names and texts, the most important first."""
    claim, names = document["claim"], document["names"]
    seeds = f"{claim['k_run']} against {claim['k_baseline']}"
    facts = [("Judged", names["judged"]), ("Against", names["baseline"]), ("Runs", seeds)]
    if claim["delta"] is not None and claim["interval"]:
        low, high = claim["interval"]
        interval = f"({amount(claim, low)} to {amount(claim, high)})"
        facts.append(("Difference", f"{amount(claim, claim['delta'])} {interval}"))
    chosen = claim.get("margin_nats")
    margin = amount(claim, claim["margin"])
    facts.append(("Margin", margin if chosen is None else f"{number(chosen)} nats ({margin})"))
    if claim["smallest_detectable"] is not None:
        facts.append(("Smallest detectable difference", amount(claim, claim["smallest_detectable"])))
    facts.append(("Error rate", percent(document["terms"]["alpha"])))
    if claim["covers"]:
        facts.append(("Covers", claim["covers"]))
    return facts


def markdown(document: Mapping[str, Any]) -> str:
    """Return the certificate as a comment for a pull request."""
    claim = document["claim"]
    sign = {"pass": "✅", "fail": "❌", "undecided": "❔"}[claim["outcome"]]
    lines = [f"### {sign} {_escaped(title_of(claim))}", "", _escaped(claim["explanation"]), ""]
    if claim["reason"]:
        lines += [_escaped(claim["reason"]), ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {_escaped(value)} |" for name, value in facts_of(document)]
    rest = [*claim["not_judged"], *claim["warnings"]]
    lines += ["", "<details><summary>What was not judged</summary>", ""]
    lines += [f"* {_escaped(sentence)}" for sentence in rest]
    return "\n".join([*lines, "", "</details>", ""])


def junit(document: Mapping[str, Any]) -> str:
    """Return the certificate as a JUnit test suite of one test."""
    claim, names = document["claim"], document["names"]
    outcome = claim["outcome"]
    suite = ElementTree.Element(
        "testsuite",
        name="fp8scope",
        tests="1",
        failures=str(int(outcome == "fail")),
        skipped=str(int(outcome == "undecided")),
        errors="0",
    )
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname="fp8scope.check",
        name=printable(f"{names['judged']} against {names['baseline']}"),
    )
    text = printable(f"{title_of(claim)}. {claim['explanation']} {claim['reason']}".strip())
    if outcome == "fail":
        ElementTree.SubElement(case, "failure", message=printable(title_of(claim))).text = text
    elif outcome == "undecided":
        ElementTree.SubElement(case, "skipped", message=text)
    else:
        ElementTree.SubElement(case, "system-out").text = text
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def printable(text: str) -> str:
    """A text without control characters: XML has none, and on a terminal none moves the cursor."""
    return "".join(character if character.isprintable() else " " for character in text)


def _escaped(text: str) -> str:
    """A text that Markdown shows as it is."""
    plain = printable(str(text))
    return "".join(f"\\{character}" if character in r"\`*_{}[]<>#|!~@" else character for character in plain)

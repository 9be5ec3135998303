"""One paragraph about a run for a paper or a model card, from its stored verdicts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from fp8scope_dashboard.text.numbers import count, percent

Form = Literal["text", "markdown", "latex"]


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts about a run. Empty texts and None are left out of the paragraph.

    Attributes:
        recipe: in words, e.g. 'delayed scaling, history 16'.
        reached, planned: steps; equal if the run did all of them.
        baseline: in words, e.g. '3 BF16 runs'.
        unpaired: whether a verdict against BF16 is missing that a reader expects: of a run that is not BF16.
        loss, scores: the stored sentences of the verdicts.
        incomplete: why the verdict does not hold for the whole run.
        overflowing, observed: tensors with overflow in the last steps, and all that were observed;
            worst_rate: the largest share of a tensor's elements.
        alerts: number of alerts by kind, in words, e.g. 'loss spike'.
    """

    name: str
    precision: str
    recipe: str = ""
    seed: int | None = None
    reached: int | None = None
    planned: int | None = None
    baseline: str = ""
    loss: str = ""
    coverage: str = ""
    incomplete: str = ""
    scores: str = ""
    overflowing: int | None = None
    observed: int | None = None
    worst_rate: float | None = None
    alerts: Sequence[tuple[str, int]] = ()
    version: str = ""
    unpaired: bool = False


def sentences(facts: RunFacts) -> list[str]:
    """The paragraph as sentences of plain text."""
    said = [_training(facts), _comparison(facts)]
    said += [facts.incomplete, facts.loss, facts.coverage, facts.scores, _overflow(facts), _alerts(facts)]
    if facts.version:
        said.append(f"Measured with fp8scope {facts.version}.")
    return [sentence for sentence in said if sentence]


def paragraph(facts: RunFacts, form: Form) -> str:
    """The paragraph on one line, with the characters escaped that have a meaning in its form."""
    text = " ".join(sentences(facts))
    if form == "markdown":
        return escaped_markdown(text)
    if form == "latex":
        return "".join(_LATEX.get(character, character) for character in text)
    return text


def escaped_markdown(text: str) -> str:
    """A text on one line, with the characters escaped that Markdown gives a meaning."""
    return _MARKDOWN.sub(r"\\\g<0>", " ".join(text.splitlines()))


def _training(facts: RunFacts) -> str:
    seed = "" if facts.seed is None else f" with seed {facts.seed}"
    how = f" ({facts.recipe})" if facts.recipe else ""
    steps = ""
    if facts.reached is not None:
        planned = f" of {facts.planned:,} planned" if facts.planned not in (None, 0, facts.reached) else ""
        steps = f" for {facts.reached:,}{planned} steps"
    return f"The run “{facts.name}” was trained in {facts.precision}{how}{seed}{steps}."


def _comparison(facts: RunFacts) -> str:
    if facts.baseline and facts.loss:
        return f"It was compared with {facts.baseline}."
    if facts.baseline:
        return f"It has not been compared with its baseline yet ({facts.baseline})."
    return "It was not compared with a BF16 run." if facts.unpaired else ""


def _overflow(facts: RunFacts) -> str:
    if facts.observed is None or facts.overflowing is None or not facts.observed:
        return ""
    if not facts.overflowing:
        return f"In its last 100 steps none of {count(facts.observed, 'observed tensor')} overflowed."
    worst = "" if facts.worst_rate is None else f", at most {_share(facts.worst_rate)} of a tensor's elements"
    return (
        f"In its last 100 steps {facts.overflowing} of {count(facts.observed, 'observed tensor')} had values "
        f"beyond the range of the format{worst}."
    )


def _share(rate: float) -> str:
    """A rate that is not zero is not rounded to zero."""
    return percent(rate) if rate >= 1e-5 else "less than 0.001 %"


def _alerts(facts: RunFacts) -> str:
    if not facts.alerts:
        return ""
    listed = ", ".join(
        in_sentence(name) if number == 1 else f"{in_sentence(name)} ({number} times)"
        for name, number in facts.alerts
    )
    return f"Alerts during the run: {listed}."


def in_sentence(title: str) -> str:
    """A title inside of a sentence: `loss spike` for `Loss spike`, but `FP8 above baseline` as it is."""
    first = title.partition(" ")[0]
    is_word = first[:1].isupper() and first[1:].islower()
    return title[:1].lower() + title[1:] if is_word else title


_MARKDOWN: Final = re.compile(r"[\\`*_\[\]<>#|~]")
_LATEX: Final = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "%": r"\%",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": "$-$",
    "×": r"$\times$",
    "–": "--",
    "“": "``",
    "”": "''",
    "’": "'",
    "…": r"\dots{}",
    "\N{NARROW NO-BREAK SPACE}": r"\,",
    "\N{NO-BREAK SPACE}": "~",
}

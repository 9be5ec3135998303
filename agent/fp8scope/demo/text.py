"""The demo's text: topics of plain sentences, composed by a small grammar.

It imitates a technical reference: headings, sentences, lists and numbers, in the words of training. A
model learns letters first, then words, then what follows what, and its loss falls as that of a language
model. There are few words, so that a short training learns them all: what is left is chance, the same for
all seeds. The text is composed with integers only, by a generator of its own, so every Python gets the same
bytes.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence

NOUNS = (
    *("loss", "scale", "gradient", "weight", "amax", "step", "layer", "tensor", "block", "batch", "margin"),
    *("history", "output", "input", "seed", "run"),
)
# Their third person and participle are regular.
VERBS = ("follow", "exceed", "update", "round", "measure", "reduce", "check", "replace", "load", "compare")
ADJECTIVES = ("large", "small", "stale", "finite", "healthy", "mean", "last", "first", "constant", "new")
ADVERBS = ("never", "often", "soon", "twice")
PREPOSITIONS = ("after", "before", "in", "above", "with", "of")
CONJUNCTIONS = ("because", "when", "until", "if")

# Upper case stands for a word of that kind.
SENTENCES = """
    the ADJECTIVE NOUN VERBS the NOUN PREPOSITION the NOUN
    the NOUN PREPOSITION the NOUN is DECIMAL
    a NOUN is ADVERB VERBED PREPOSITION the NOUN
    CONJUNCTION the NOUN VERBS the NOUN, the NOUN is VERBED
    the NOUN rose from DECIMAL to DECIMAL
    each NOUN VERBS NUMBER NOUNS PREPOSITION the NOUN
    no NOUN is VERBED CONJUNCTION the NOUN is ADJECTIVE
    at step NUMBER the NOUN is DECIMAL
""".strip().splitlines()

TOPICS = 64
TOPIC_BYTES = 5_800
LINE = 78
LISTED = 4
"""Every so many paragraphs one is a list."""

_WORD = re.compile("[A-Z]+")
_ARTICLE = re.compile(r"\ba(?= [aeio])")
_MASK = 2**64 - 1


class Chance:
    """Pseudo-random integers: the generator xorshift64* (Vigna, 2016).

    Of the standard library's generator, Python promises only that `random()` stays the same in all versions.
    """

    def __init__(self, seed: int) -> None:
        # Similar seeds give different states, and none gives 0 (SplitMix64's first multiplication).
        self._state = (2 * seed + 1) * 0x9E3779B97F4A7C15 & _MASK
        for _ in range(16):
            self.below(2)

    def below(self, limit: int) -> int:
        """An integer from 0 to limit - 1, all about equally likely."""
        self._state ^= self._state >> 12
        self._state = (self._state ^ self._state << 25) & _MASK
        self._state ^= self._state >> 27
        return ((self._state * 0x2545F4914F6CDD1D & _MASK) >> 33) * limit >> 31

    def early(self, words: Sequence[str], power: int) -> str:
        """A word of the sequence; the greater the power, the more likely one at its beginning."""
        limit = len(words)
        for _ in range(power):
            limit = self.below(limit) + 1
        return words[limit - 1]

    def shuffled(self, words: Sequence[str]) -> list[str]:
        """The words in another order."""
        rest = list(words)
        return [rest.pop(self.below(len(rest))) for _ in words]


def topics(seed: int = 0) -> dict[str, str]:
    """The text of each topic, by its name, in ASCII. Another seed writes other topics with the same words."""
    chance = Chance(seed)
    return {f"Topic {number}": _topic(f"Topic {number}", chance) for number in range(1, TOPICS + 1)}


def _topic(heading: str, chance: Chance) -> str:
    """A topic of about TOPIC_BYTES bytes. It prefers some of the sentences."""
    kinds: dict[str, Callable[[], str]] = {
        "NOUN": lambda: chance.early(NOUNS, 2),
        "NOUNS": lambda: _with_s(chance.early(NOUNS, 2)),
        "VERBS": lambda: _with_s(chance.early(VERBS, 2)),
        "VERBED": lambda: _participle(chance.early(VERBS, 2)),
        "ADJECTIVE": lambda: chance.early(ADJECTIVES, 2),
        "ADVERB": lambda: chance.early(ADVERBS, 1),
        "PREPOSITION": lambda: chance.early(PREPOSITIONS, 1),
        "CONJUNCTION": lambda: chance.early(CONJUNCTIONS, 1),
        "NUMBER": lambda: str(chance.below(10_000)),
        "DECIMAL": lambda: f"{chance.below(10)}.{chance.below(10_000):04}",
    }
    sentences = chance.shuffled(SENTENCES)

    def sentence() -> str:
        pattern = chance.early(sentences, 1).strip()
        text = _ARTICLE.sub("an", _WORD.sub(lambda match: kinds[match[0]](), pattern))
        return f"{text[0].upper()}{text[1:]}."

    paragraphs = [f"{heading}\n{'=' * len(heading)}"]
    while sum(map(len, paragraphs)) < TOPIC_BYTES:
        count = 3 + chance.below(4)
        if len(paragraphs) % LISTED == 0:
            items = (f"* {kinds['NOUN']()}: {kinds['DECIMAL']()}" for _ in range(count))
            paragraphs.append("\n".join(items))
        else:
            paragraphs.append(textwrap.fill(" ".join(sentence() for _ in range(count)), LINE))
    return "\n\n".join(paragraphs) + "\n"


def _with_s(word: str) -> str:
    """The plural of a noun, or the third person of a verb."""
    return f"{word}{'es' if word.endswith(('ch', 's', 'sh', 'x')) else 's'}"


def _participle(verb: str) -> str:
    return f"{verb}{'d' if verb.endswith('e') else 'ed'}"

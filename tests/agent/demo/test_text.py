"""The text that the demo writes for itself."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fp8scope.demo import text

TOPICS = text.topics()
DIGEST = (
    "import hashlib, importlib.util, sys; "
    "spec = importlib.util.spec_from_file_location('text', sys.argv[1]); "
    "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module); "
    "print(hashlib.sha256(repr(module.topics(3)).encode()).hexdigest())"
)


def test_it_works() -> None:
    assert len(TOPICS) == text.TOPICS
    for name, content in TOPICS.items():
        assert content.isascii() and content.startswith(f"{name}\n{'=' * len(name)}\n\n")
        assert text.TOPIC_BYTES <= len(content) < 1.2 * text.TOPIC_BYTES
        assert max(map(len, content.splitlines())) <= text.LINE


def test_it_is_made_of_words_and_numbers_only() -> None:
    """No placeholder is left, and every word is one of the lists or of the sentences."""
    words = Counter(word.strip(".,:*") for content in TOPICS.values() for word in content.split())
    assert not [word for word in words if word.isalpha() and word.isupper() and len(word) > 1]
    assert len(words) > 2_000 and words["the"] > 5_000 and words["gradients"] > 50
    assert not re.findall(r"\ba [aeio]", " ".join(TOPICS.values()))


def test_no_line_of_prose_repeats_in_another_topic() -> None:
    lines = Counter(line for content in TOPICS.values() for line in content.splitlines() if len(line) > 60)
    assert max(lines.values()) == 1


def test_seeds_write_different_texts() -> None:
    assert text.topics(1) != text.topics(2)
    assert text.topics(1) == text.topics(1)


def test_chance_is_even() -> None:
    chance = text.Chance(5)
    drawn = Counter(chance.below(10) for _ in range(20_000))
    assert set(drawn) == set(range(10)) and max(drawn.values()) < 1.1 * min(drawn.values())
    assert [text.Chance(5).below(1_000) for _ in range(3)] == [text.Chance(5).below(1_000)] * 3


def pythons() -> list[str]:
    """This interpreter, and those of this machine that run and are not older than what fp8scope needs."""
    names = [Path("/usr/bin/python3"), *Path.home().glob(".pyenv/versions/3.1[1-9]*/bin/python3")]
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    others = [str(name) for name in names if name.exists()]
    return [sys.executable, *(each for each in others if subprocess.run([each, "-c", check]).returncode == 0)]


@pytest.mark.parametrize("python", pythons())
def test_every_python_writes_the_same_bytes(python: str) -> None:
    command = [python, "-c", DIGEST, str(text.__file__)]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "8ab1753945d45a473d5f2136eef1c71c58cf9c3ba4ce8df8500b867ed7b9d86a", (
        done.stderr
    )

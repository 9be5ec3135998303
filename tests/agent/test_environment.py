"""What a run remembers of the machine, and what it must not."""

import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope.environment import (
    REDACTED,
    describe_environment,
    is_secret_name,
    plain,
    redact,
    redact_arguments,
)


def test_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1e-3", "--wandb-api-key", "abc123", "--token=xyz"])
    found = describe_environment()
    assert found["command"] == f"train.py --lr 1e-3 --wandb-api-key {REDACTED} --token={REDACTED}"
    assert found["python"] and found["hostname"] and found["fp8scope"]
    json.dumps(found, allow_nan=False)


def test_the_commit_is_the_working_directorys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert describe_environment()["git_commit"] == ""
    import subprocess

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        done = subprocess.run(["git", *identity, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "x")
    commit = describe_environment()["git_commit"]
    assert commit == git("rev-parse", "HEAD") and re.fullmatch("[0-9a-f]{40}", commit)


@pytest.mark.parametrize(
    "text",
    [
        "https://me:SECRET@host/path",
        "password=SECRET",
        "api_key: 'SECRET'",
        "AWS_SECRET_ACCESS_KEY=SECRET",
        "connect(token=SECRET)",
        "fp8s_SECRETSECRET",
        "hf_SECRETSECRET",
        "ghp_SECRETSECRET",
    ],
)
def test_secrets_are_redacted(text: str) -> None:
    assert "SECRET" not in redact(text).replace("AWS_SECRET_ACCESS_KEY", "")
    assert REDACTED in redact(text)


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens",
        "tokenizer",
        "num_tokens",
        "tokens_per_second",
        "author",
        "vocab",
        "token_embedding",
        "keys",
    ],
)
def test_what_models_are_made_of_is_no_secret(name: str) -> None:
    assert not is_secret_name(name)
    assert plain({name: "value"}) == {name: "value"}


def test_a_value_after_an_option_is_not_an_option() -> None:
    assert redact_arguments(["--token", "--verbose", "x"]) == ["--token", "--verbose", "x"]
    assert redact_arguments(["--password", "a b", "c"]) == ["--password", REDACTED, "c"]


@dataclass
class Config:
    rate: float
    path: Path
    api_key: str


def test_a_configuration_of_any_kind() -> None:
    deep: list[Any] = [[[[[[[[[[1]]]]]]]]]]
    found = plain({"model": Config(math.nan, Path("/data"), "x"), 3: {1}, "deep": deep})
    assert found["model"] == {"rate": "nan", "path": "/data", "api_key": REDACTED}
    assert found["3"] == [1]
    json.dumps(found, allow_nan=False)


anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(anything)
def test_whatever_a_configuration_holds_can_be_sent(value: Any) -> None:
    json.dumps(plain(value), allow_nan=False)


def test_text_that_a_database_cannot_hold() -> None:
    assert plain({"a\x00b": "c\x00d\udc80"}) == {"ab": "cd?"}


def test_a_configuration_that_holds_itself() -> None:
    endless: dict[str, Any] = {}
    endless["self"] = endless
    assert len(json.dumps(plain(endless))) < 10_000

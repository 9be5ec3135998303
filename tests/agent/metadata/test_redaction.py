"""Removal of secrets from text, command lines and configurations."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope.metadata.redaction import REDACTED, is_secret_name, plain, redact, redact_arguments


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
        "-----BEGIN RSA PRIVATE KEY-----\n+SECRET\n+SECRET\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nSECRET, cut off",
    ],
)
def test_redacts_secrets_in_text(text: str) -> None:
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
def test_keeps_names_that_are_common_in_model_settings(name: str) -> None:
    assert not is_secret_name(name)
    assert plain({name: "value"}) == {name: "value"}


@pytest.mark.parametrize("word", ["a", "ab-.", "a=", "token", "eyJ-"])
def test_redacts_one_very_long_word_in_linear_time(word: str) -> None:
    # A pattern that backtracks over every start and end would not return in time.
    assert redact(word * (300_000 // len(word)))


def test_does_not_redact_an_option_after_a_secret_option() -> None:
    assert redact_arguments(["--token", "--verbose", "x"]) == ["--token", "--verbose", "x"]
    assert redact_arguments(["--password", "a b", "c"]) == ["--password", REDACTED, "c"]


@dataclass
class Config:
    rate: float
    path: Path
    api_key: str


def test_converts_dataclasses_sets_paths_and_deep_nesting() -> None:
    deep: list[Any] = [[[[[[[[[[1]]]]]]]]]]
    converted = plain({"model": Config(math.nan, Path("/data"), "x"), 3: {1}, "deep": deep})
    assert converted["model"] == {"rate": "nan", "path": "/data", "api_key": REDACTED}
    assert converted["3"] == [1]
    json.dumps(converted, allow_nan=False)


json_like: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(json_like)
def test_converts_any_value_to_valid_json(value: Any) -> None:
    json.dumps(plain(value), allow_nan=False)


def test_removes_characters_that_postgresql_rejects() -> None:
    assert plain({"a\x00b": "c\x00d\udc80"}) == {"ab": "cd?"}


def test_bounds_a_configuration_that_contains_itself() -> None:
    config: dict[str, Any] = {}
    config["self"] = config
    assert len(json.dumps(plain(config))) < 10_000

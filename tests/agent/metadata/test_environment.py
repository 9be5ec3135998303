"""What a run remembers of the machine, and what it must not."""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8scope.metadata.environment import (
    REDACTED,
    describe_environment,
    driver_version,
    gpu_names,
    is_secret_name,
    job,
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


def test_ranks_and_the_schedulers_job() -> None:
    torchrun = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "HOME": "/root"}
    assert job(torchrun) == {"rank": "3", "local_rank": "1", "world_size": "8"}
    slurm = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert job(slurm) == {"rank": "2", "world_size": "4", "slurm_job_id": "77", "slurm_nodes": "n[1-2]"}
    # Started by srun, then by torchrun: the inner one counts.
    assert job({**slurm, **torchrun})["rank"] == "3"
    assert job({"SLURM_JOB_NAME": "train hf_SECRETSECRET"}) == {"slurm_job_name": f"train {REDACTED}"}
    assert len(job({"SLURM_JOB_NODELIST": "n" * 9999})["slurm_nodes"]) == 500 and job({}) == {}


def test_the_machines_gpus_and_their_driver(tmp_path: Path) -> None:
    assert gpu_names(tmp_path) == [] and driver_version(tmp_path) == ""
    for index in range(2):
        folder = tmp_path / "gpus" / f"0000:0{index}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA H200\nIRQ:   \t\t {index}\n")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Wed Jan 22 2025\nGCC version: 12\n"
    )
    assert gpu_names(tmp_path) == ["NVIDIA H200", "NVIDIA H200"] and driver_version(tmp_path) == "570.86.15"


def test_what_is_not_installed_is_not_told() -> None:
    found = describe_environment()
    assert found["torchao"] and "transformer_engine" not in found
    assert found["gpu_count"] == len(found["gpus"])


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


@pytest.mark.parametrize("word", ["a", "ab-.", "a=", "token", "eyJ-"])
def test_one_endless_word_is_redacted_too(word: str) -> None:
    # A pattern that tried every beginning with every end would not come back from this.
    assert redact(word * (300_000 // len(word)))


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

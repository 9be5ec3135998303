"""The description of the machine and the process."""

import json
import sys
from pathlib import Path

import pytest

from fp8scope.metadata.environment import describe_environment, driver_version, gpu_names, job
from fp8scope.metadata.redaction import REDACTED


def test_describes_the_process_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1e-3", "--wandb-api-key", "abc123", "--token=xyz"])
    environment = describe_environment()
    assert environment["command"] == f"train.py --lr 1e-3 --wandb-api-key {REDACTED} --token={REDACTED}"
    assert environment["python"] and environment["hostname"] and environment["fp8scope"]
    json.dumps(environment, allow_nan=False)


def test_reads_ranks_and_job_ids_from_the_environment() -> None:
    torchrun = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "HOME": "/root"}
    assert job(torchrun) == {"rank": "3", "local_rank": "1", "world_size": "8"}
    srun = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}
    slurm = {**srun, "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert job(slurm) == {"rank": "2", "world_size": "4", "slurm_job_id": "77", "slurm_nodes": "n[1-2]"}
    # torchrun was started by srun: its rank is used.
    assert job({**slurm, **torchrun})["rank"] == "3"
    assert job({"SLURM_JOB_NAME": "train hf_SECRETSECRET"}) == {"slurm_job_name": f"train {REDACTED}"}
    assert len(job({"SLURM_JOB_NODELIST": "n" * 9999})["slurm_nodes"]) == 500 and job({}) == {}


def test_reads_gpus_and_driver_version_from_proc(tmp_path: Path) -> None:
    assert gpu_names(tmp_path) == [] and driver_version(tmp_path) == ""
    for index in range(2):
        folder = tmp_path / "gpus" / f"0000:0{index}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA H200\nIRQ:   \t\t {index}\n")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Wed Jan 22 2025\nGCC version: 12\n"
    )
    assert gpu_names(tmp_path) == ["NVIDIA H200", "NVIDIA H200"] and driver_version(tmp_path) == "570.86.15"


def test_leaves_out_packages_that_are_not_installed() -> None:
    environment = describe_environment()
    assert environment["torchao"] and "transformer_engine" not in environment
    assert environment["gpu_count"] == len(environment["gpus"])

"""The limits of a replay: steps of several processes, and other devices than that of the recording."""

import sys
from collections.abc import Mapping
from typing import Any

from fp8scope.metadata.environment import gpu_names

PROCESSES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables with the number of processes that a launcher has started; SLURM_NTASKS is of an allocation."""
DETERMINISTIC = "torch.use_deterministic_algorithms(True) and CUBLAS_WORKSPACE_CONFIG=:4096:8"


def refusal(environment: Mapping[str, str]) -> str:
    """Return why no replay can begin in this process; empty if it can. `environment`: its variables."""
    for name in PROCESSES:
        if _count(environment.get(name)) > 1:
            return (
                f"this process is one of several ({name} is {environment[name]}). A replay drives one "
                "process: start it without torchrun, srun or mpirun."
            )
    return ""


def notes(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what may make the replayed step differ from the recorded one: one sentence each.

    Args:
        document: of the incident; see `FlightRecorder`.
    """
    recorded = document.get("environment") or {}
    sentences = []
    ranks = _count(recorded.get("world_size"))
    if ranks > 1:
        sentences.append(
            f"The incident is of rank {document.get('rank', 0)} of {ranks}. This process replays that rank "
            "alone: with data parallelism the loss of the first step after a snapshot is the recorded one, "
            "and later ones differ, because gradients were averaged over the ranks. Sharded models (FSDP, "
            "tensor or pipeline parallelism) cannot be replayed."
        )
    theirs, ours = str(recorded.get("gpu") or ""), next(iter(gpu_names()), "")
    if theirs and theirs != ours:
        here = ours or "no NVIDIA GPU"
        sentences.append(
            f"The incident was recorded with {theirs}, and this machine has {here}: other kernels add in "
            "another order, so that the loss is close to the recorded one and not the same bit for bit."
        )
    elif theirs and not _is_deterministic():
        sentences.append(f"On a GPU, steps are the same bit for bit only with {DETERMINISTIC}.")
    return tuple(sentences)


def _is_deterministic() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.are_deterministic_algorithms_enabled())


def _count(text: Any) -> int:
    try:
        return int(text)
    except (TypeError, ValueError):
        return 1

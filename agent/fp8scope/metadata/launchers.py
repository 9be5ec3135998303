"""The environment variables by which launchers number the processes of a job."""

from collections.abc import Mapping
from typing import NamedTuple


class Variables(NamedTuple):
    """The environment variables in which a launcher tells a process where it is."""

    rank: str
    size: str
    local_rank: str
    local_size: str


LAUNCHERS = (
    # torchrun, accelerate, Ray Train, and scripts that start processes for torch.distributed.
    Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    # DeepSpeed, which tells the size of a node by another name.
    Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
    # Open MPI. Before Slurm: mpirun may start its daemons by srun.
    Variables(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    # MVAPICH.
    Variables(*(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    # MPICH and Intel MPI.
    Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # srun. SLURM_NTASKS is of the allocation, in which a process may be alone.
    Variables("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)
"""Of several launchers the first one counts whose variables of rank and size are all set."""


def variables_of(environment: Mapping[str, str]) -> Variables:
    """Return the variables of the launcher that started this process; those of torchrun without one."""
    described = [names for names in LAUNCHERS if environment.get(names.rank) and environment.get(names.size)]
    first = (described or LAUNCHERS)[0]
    # DeepSpeed's variables are torchrun's but for one.
    same = [names for names in described if names.rank == first.rank and environment.get(names.local_size)]
    return (same or [first])[0]


def ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return rank, rank on the node and number of ranks, as far as the launcher tells them."""
    names = variables_of(environment)
    described = {"rank": names.rank, "local_rank": names.local_rank, "world_size": names.size}
    return {field: environment[name] for field, name in described.items() if environment.get(name)}

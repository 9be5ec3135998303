"""Lets all ranks of a job agree on the run that they write to.

On one node torchrun passes the folder of the launch to every rank in TORCHELASTIC_ERROR_FILE. Its random name
and the host name give an id that all ranks compute alike, without communication. The id survives a restart of
the workers, which is the next attempt of the same run. Other variables do not identify a launch:
TORCHELASTIC_RUN_ID is "none" by default, and MASTER_PORT is 29500 in every launch or changes with a restart.

Other launchers name a launch, too: Slurm by the numbers of job and job step, Open MPI by a random key. Those
of DeepSpeed and MPICH do not, but are the parent process of all ranks of a node: on one node its number and
start are the id.

Elsewhere the ranks use an existing key-value store: that of torchrun, or that of torch.distributed once it is
initialised. The first rank writes, the others read, and none waits.
"""

import logging
import os
import re
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from fp8scope.guard import before_any_run
from fp8scope.metadata.launchers import variables_of

STORE_SECONDS = 10.0
NAMESPACE = uuid.UUID("6d0d8a0e-3f0c-5d7e-9a53-0f6f1c1b7a51")

logger = logging.getLogger("fp8scope")


PARENTS = ("deepspeed.launcher.launch", "deepspeed/launcher/launch.py", "hydra_pmi_proxy")
"""Parts of the command lines of launchers that start all ranks of a node, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A launch of `size` ranks on `nodes` nodes, whose workers were restarted `restarts` times."""

    rank: int = 0
    size: int = 1
    nodes: int = 1
    restarts: int = 0
    launch: str = ""
    """A text that only the ranks of this launch share; empty if there is none."""
    store_address: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Job":
        """Read the job from the environment variables of its launcher."""
        names = variables_of(environment)
        size = _count(environment.get(names.size), 1)
        local = _count(environment.get(names.local_size), 0)
        nodes = _count(environment.get("GROUP_WORLD_SIZE"), 0) or (-(-size // local) if local else 0)
        agent_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address = f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}"
        return cls(
            rank=_count(environment.get(names.rank), 0),
            size=size,
            nodes=nodes,
            restarts=_count(environment.get("TORCHELASTIC_RESTART_COUNT"), 0) if size > 1 or local else 0,
            launch=_launch(environment, size, nodes),
            store_address=address if agent_store else "",
        )

    def shared_run(self, number: int = 0) -> str:
        """Return the id of the run that all ranks write to; empty if this rank needs its own.

        `number` is how many runs this process began before: every rank begins them in the same order.
        """
        if self.launch:
            return str(uuid.uuid5(NAMESPACE, f"{self.launch} {number}"))
        if self.size <= 1:
            return ""
        shared = self.agree(f"run {number}", "")
        if not shared:
            logger.warning(
                "rank %d of %d does not know the run of the other ranks and records its own. Call"
                " fp8scope.init after init_process_group, or set the same FP8SCOPE_RUN_ID on all ranks.",
                self.rank,
                self.size,
            )
        return shared

    def agree(self, about: str, proposal: str) -> str:
        """Return the proposal of the first rank that asks; our own if the ranks share no store.

        An empty proposal stands for a new UUID, and is returned empty if there is no store.
        """
        if self.size <= 1:
            return proposal
        try:
            store = self._store()
            if store is not None:
                # The run survives a restart of its ranks; everything else is agreed on again.
                key = f"fp8scope {about}" if not proposal else f"fp8scope {about} {self.restarts}"
                return bytes(store.compare_set(key, "", proposal or str(uuid.uuid4()))).decode()
        except Exception as error:
            before_any_run("agreeing with the other ranks", error)
        return proposal

    def _store(self) -> Any:
        """Return the key-value store of torchrun, else of the process group; None if there is neither."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.distributed.is_available():
            return None
        host, _, port = self.store_address.rpartition(":")
        if host and port.isdecimal():
            patience = timedelta(seconds=STORE_SECONDS)
            return torch.distributed.TCPStore(host, int(port), is_master=False, timeout=patience)
        if torch.distributed.is_initialized():
            return torch.distributed.distributed_c10d._get_default_store()
        return None


def _launch(environment: Mapping[str, str], size: int, nodes: int) -> str:
    error_file = environment.get("TORCHELASTIC_ERROR_FILE", "")
    folder = re.search(r"^(.+)[/\\]attempt_\d+[/\\]\d+[/\\][^/\\]+$", error_file)
    if nodes == 1 and folder:
        return f"torchrun {socket.gethostname()} {folder[1]}"
    if "TORCHELASTIC_RUN_ID" in environment:
        return ""
    # A process that is alone may be one of several scripts, one after the other.
    key = environment.get("OMPI_MCA_orte_precondition_transports", "")
    if key and size > 1:
        return f"mpi {key} {environment.get('PMIX_NAMESPACE', '')}"
    slurm = [environment.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID")]
    if slurm[1] and slurm[2] and size > 1:
        return f"slurm {' '.join(slurm)} {environment.get('SLURM_RESTART_COUNT', '0')}"
    return _parent_launcher() if nodes == 1 and size > 1 else ""


def _parent_launcher() -> str:
    """The number and the start of the parent process, if that is a launcher; empty without /proc."""
    parent = Path("/proc") / str(os.getppid())
    try:
        command = (parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        # After the command's name in parentheses, which may hold spaces, the start is the 20th field.
        started = (parent / "stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    is_launcher = any(name in command for name in PARENTS)
    return f"parent {socket.gethostname()} {os.getppid()} {started}" if is_launcher else ""


def rank_of(environment: Mapping[str, str] | None = None) -> int:
    """Return the rank of this process, from the environment of its launcher."""
    env = os.environ if environment is None else environment
    return _count(env.get(variables_of(env).rank), 0)


def _count(text: str | None, default: int) -> int:
    return int(text) if text and text.isdecimal() and len(text) < 8 else default

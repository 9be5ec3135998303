"""Lets all ranks of a job agree on the run that they write to.

On one node torchrun passes the folder of the launch to every rank in TORCHELASTIC_ERROR_FILE. Its random name
and the host name give an id that all ranks compute alike, without communication. The id survives a restart of
the workers, which is the next attempt of the same run. Other variables do not identify a launch:
TORCHELASTIC_RUN_ID is "none" by default, and MASTER_PORT is 29500 in every launch or changes with a restart.

On several nodes the ranks use an existing key-value store: that of torchrun, or that of torch.distributed
once it is initialised. The first rank writes, the others read, and none waits. Under Slurm without torchrun,
the numbers of job and job step are the id.
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
from typing import Any

from fp8scope.guard import before_any_run

STORE_SECONDS = 10.0
NAMESPACE = uuid.UUID("6d0d8a0e-3f0c-5d7e-9a53-0f6f1c1b7a51")

logger = logging.getLogger("fp8scope")


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
        size = _count(environment.get("WORLD_SIZE"), 1)
        local = _count(environment.get("LOCAL_WORLD_SIZE"), 0)
        nodes = _count(environment.get("GROUP_WORLD_SIZE"), 0) or (-(-size // local) if local else 0)
        agent_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address = f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}"
        return cls(
            rank=_count(environment.get("RANK"), 0),
            size=size,
            nodes=nodes,
            restarts=_count(environment.get("TORCHELASTIC_RESTART_COUNT"), 0) if size > 1 or local else 0,
            launch=_launch(environment, nodes),
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


def _launch(environment: Mapping[str, str], nodes: int) -> str:
    error_file = environment.get("TORCHELASTIC_ERROR_FILE", "")
    folder = re.search(r"^(.+)[/\\]attempt_\d+[/\\]\d+[/\\][^/\\]+$", error_file)
    if nodes == 1 and folder:
        return f"torchrun {socket.gethostname()} {folder[1]}"
    slurm = [environment.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID")]
    if slurm[1] and slurm[2] and "TORCHELASTIC_RUN_ID" not in environment:
        return f"slurm {' '.join(slurm)} {environment.get('SLURM_RESTART_COUNT', '0')}"
    return ""


def rank_of(environment: Mapping[str, str] | None = None) -> int:
    """Return the rank of this process, from the environment of its launcher."""
    return _count((os.environ if environment is None else environment).get("RANK"), 0)


def _count(text: str | None, default: int) -> int:
    return int(text) if text and text.isdecimal() and len(text) < 8 else default

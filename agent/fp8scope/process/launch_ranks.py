"""How the ranks of one job find out that they write to the same run.

On one node torchrun tells every rank, through TORCHELASTIC_ERROR_FILE, the folder that it has made for this
launch; its random name and the host's make an id that all ranks compute alike, without a word between them.
It stays the same when torchrun restarts its workers, which is then the next attempt at the same run. The
other variables do not do: TORCHELASTIC_RUN_ID is "none" unless somebody chose one, and MASTER_PORT is 29500
in every launch with the defaults, or another one after each restart.

Over several nodes there is no such name. There the ranks use a key-value store that exists anyway:
torchrun's, or that of torch.distributed once it is initialised. Whoever comes first writes, the others read;
nobody waits. Under Slurm without torchrun, the job's and the step's number are the name.
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


@dataclass(frozen=True)
class Job:
    """A launch of `size` ranks on `nodes` nodes; `restarts` counts how often its ranks were begun again."""

    rank: int = 0
    size: int = 1
    nodes: int = 1
    restarts: int = 0
    launch: str = ""
    """What only the ranks of this launch have in common; empty when nothing is known."""
    store_address: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Job":
        """The job as its launcher put it into the environment."""
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
        """The id of the run that all ranks write to; empty when this rank has to have its own.

        `number` counts the runs that this process has begun before: every rank begins them in the same order.
        """
        if self.launch:
            return str(uuid.uuid5(NAMESPACE, f"{self.launch} {number}"))
        if self.size <= 1:
            return ""
        shared = self.agree(f"run {number}", "")
        if not shared:
            logger.warning(
                "rank %d of %d cannot tell which run the others write to, and records its own. Call"
                " fp8scope.init after init_process_group, or set FP8SCOPE_RUN_ID to one UUID everywhere.",
                self.rank,
                self.size,
            )
        return shared

    def agree(self, about: str, proposal: str) -> str:
        """What the first rank to ask has proposed; one's own proposal where the ranks share no store.

        An empty proposal stands for a new UUID, and comes back empty where there is no store.
        """
        if self.size <= 1:
            return proposal
        try:
            store = self._store()
            if store is not None:
                # A run outlives a restart of its ranks; everything else is agreed upon anew.
                key = f"fp8scope {about}" if not proposal else f"fp8scope {about} {self.restarts}"
                return bytes(store.compare_set(key, "", proposal or str(uuid.uuid4()))).decode()
        except Exception as error:
            before_any_run("agreeing with the other ranks", error)
        return proposal

    def _store(self) -> Any:
        """torchrun's key-value store, else that of the process group; None when there is neither."""
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
    found = re.search(r"^(.+)[/\\]attempt_\d+[/\\]\d+[/\\][^/\\]+$", error_file)
    if nodes == 1 and found:
        return f"torchrun {socket.gethostname()} {found[1]}"
    slurm = [environment.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID")]
    if slurm[1] and slurm[2] and "TORCHELASTIC_RUN_ID" not in environment:
        return f"slurm {' '.join(slurm)} {environment.get('SLURM_RESTART_COUNT', '0')}"
    return ""


def rank_of(environment: Mapping[str, str] | None = None) -> int:
    """This process's rank as its launcher put it into the environment."""
    return _count((os.environ if environment is None else environment).get("RANK"), 0)


def _count(text: str | None, default: int) -> int:
    return int(text) if text and text.isdecimal() and len(text) < 8 else default

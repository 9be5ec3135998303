"""Several ranks write to one run, each with a writer of its own, and one of them dies."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from agent.helpers.scripts import environment, sync_all
from agent.helpers.wire_server import WireServer

from fp8scope.config import Settings
from fp8scope.process.launch_ranks import Job

TESTS = Path(__file__).parents[2]


def torchrun(
    server: WireServer,
    settings: Settings,
    size: int,
    *arguments: str,
    options: tuple[str, ...] = ("--standalone",),
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """`torchrun tests/agent/helpers/rank.py ARGUMENTS` on `size` processes."""
    path = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
    surroundings = environment(server, settings.directory, OMP_NUM_THREADS="1", PYTHONPATH=path, **more)
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node", str(size)]
    return subprocess.run(
        [*command, str(TESTS / "agent" / "helpers" / "rank.py"), *arguments],
        env=surroundings,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def steps_of(server: WireServer) -> dict[tuple[int, int], list[int]]:
    """The stored steps by (rank, attempt)."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in server.run.rows:
        place = server.run.places[row["writer"]]
        found[place["rank"], place["attempt"]].append(row["step"])
    return dict(found)


def test_it_works(server: WireServer, settings: Settings) -> None:
    """DDP on two ranks: one run, each rank's rows, all finished."""
    done = torchrun(server, settings, 2, "ddp", "6", "-1", "0", "agree")
    assert done.returncode == 0, done.stderr
    assert steps_of(server) == {(0, 0): [1, 2, 3, 4, 5, 6], (1, 0): [1, 2, 3, 4, 5, 6]}
    assert [end["state"] for end in server.run.finishes] == ["finished", "finished"]
    assert len(server.run.catalogues) == 2
    # With the amaxes agreed upon, so are the scales.
    last = [row["tensors"]["scale"] for row in server.run.rows if row["step"] == 6]
    assert last[0] == last[1]
    assert sync_all(settings) == []


@pytest.mark.slow
def test_fsdp_continues_the_run_after_a_rank_is_killed(server: WireServer, settings: Settings) -> None:
    """torchrun begins all ranks again: the same run, the next attempt."""
    options = ("--standalone", "--max-restarts", "1", "--monitor-interval", "0.1")
    # Without the second, torch gives the restarted ranks the addresses of those that are gone.
    more = {"TEST_INIT": "early", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = torchrun(server, settings, 4, "fsdp", "8", "2", "5", "disagree", options=options, **more)
    assert done.returncode == 0, done.stderr
    assert all(report.problem == "" for report in sync_all(settings))
    stored = steps_of(server)
    assert stored[2, 0], (stored, server.run.places, done.stderr)
    assert {key for key in stored if key[1] == 1} == {(rank, 1) for rank in range(4)}, (
        stored,
        server.run.places,
    )
    assert all(stored[rank, 1] == [4, 5, 6, 7, 8] for rank in range(4))
    # Of the rank that was killed at most the last step is lost; nobody got beyond the next one without it.
    assert stored[2, 0] in ([1, 2, 3, 4], [1, 2, 3, 4, 5])
    assert all(stored[rank, 0][:4] == [1, 2, 3, 4] and len(stored[rank, 0]) <= 6 for rank in range(4))
    errors = [end["error"] for end in server.run.finishes if end["state"] == "failed"]
    assert any("was killed" in error for error in errors)
    assert sum(end["state"] == "finished" for end in server.run.finishes) == 4


LAUNCH = "/tmp/torchelastic_x/none_abc/attempt_{restart}/{local}/error.json"


def torchelastic(rank: int, restart: int = 0, **more: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_ERROR_FILE": LAUNCH.format(restart=restart, local=rank),
        **more,
    }


def test_ranks_of_a_launch_agree_without_communication() -> None:
    jobs = [Job.of(torchelastic(rank, restart)) for rank in range(4) for restart in range(2)]
    assert len({job.shared_run() for job in jobs}) == 1 and jobs[0].shared_run()
    assert {job.restarts for job in jobs} == {0, 1}
    # The second run of every process is another one; another launch's as well.
    assert jobs[0].shared_run(1) == jobs[3].shared_run(1) != jobs[0].shared_run(0)
    other = LAUNCH.format(restart=0, local=0).replace("abc", "xyz")
    assert Job.of(torchelastic(0, TORCHELASTIC_ERROR_FILE=other)).shared_run() != jobs[0].shared_run()


@pytest.mark.parametrize(
    "surroundings",
    [
        {},
        {"RANK": "x", "WORLD_SIZE": "-3"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"TORCHELASTIC_RESTART_COUNT": "5"},
        {"SLURM_JOB_ID": "1"},
    ],
)
def test_a_standalone_process_has_a_separate_run(surroundings: dict[str, str]) -> None:
    job = Job.of(surroundings)
    assert job.shared_run() == "" and job.restarts == 0 and job.agree("x", "mine") == "mine"


def test_recognises_ranks_of_slurm() -> None:
    step = {"WORLD_SIZE": "8", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
    first, second = Job.of({**step, "RANK": "0"}), Job.of({**step, "RANK": "7"})
    assert first.shared_run() == second.shared_run() != ""
    assert Job.of({**step, "SLURM_STEP_ID": "1"}).shared_run() != first.shared_run()


STORE = """
import os, sys, torch
from fp8scope.process.launch_ranks import Job
where = {"init_method": "file://" + sys.argv[1], "rank": int(os.environ["RANK"]), "world_size": 2}
torch.distributed.init_process_group("gloo", **where)
job = Job.of(os.environ)
print(job.shared_run(), job.shared_run(1), job.agree("attempt", os.environ["RANK"]))
"""


def test_nodes_agree_through_the_process_group(tmp_path: Path) -> None:
    """No launcher says anything: what the first one comes up with holds for both."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", STORE, str(tmp_path / "rendezvous")],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=200)[0].split() for rank in ranks]
    assert said[0] == said[1] and len(said[0]) == 3
    assert said[0][0] != said[0][1] and said[0][2] in ("0", "1")


def test_warns_if_ranks_cannot_agree(caplog: pytest.LogCaptureFixture) -> None:
    job = Job.of({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert job.nodes == 2 and job.shared_run() == ""
    assert "rank 3 of 8" in caplog.text and "FP8SCOPE_RUN_ID" in caplog.text

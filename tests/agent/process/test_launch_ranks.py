"""Several ranks write to one run with separate writers, also if one of them dies."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from agent.helpers.scripts import environment, sync_all
from agent.helpers.wire_server import WireServer

from fp8scope.config import Settings
from fp8scope.process.launch_ranks import Job, rank_of

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
    """torchrun restarts all ranks; they continue the same run as its next attempt."""
    options = ("--standalone", "--max-restarts", "1", "--monitor-interval", "0.1")
    # Without the second, torch gives the restarted ranks the addresses of those that are gone.
    more = {"TEST_INIT": "early", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = torchrun(server, settings, 2, "fsdp", "8", "1", "5", "disagree", options=options, **more)
    assert done.returncode == 0, done.stderr
    assert all(report.problem == "" for report in sync_all(settings))
    stored = steps_of(server)
    assert stored[1, 0], (stored, server.run.places, done.stderr)
    assert {key for key in stored if key[1] == 1} == {(rank, 1) for rank in range(2)}, (
        stored,
        server.run.places,
    )
    assert all(stored[rank, 1] == [4, 5, 6, 7, 8] for rank in range(2))
    # Of the rank that was killed at most the last step is lost; nobody got beyond the next one without it.
    assert stored[1, 0] in ([1, 2, 3, 4], [1, 2, 3, 4, 5])
    assert all(stored[rank, 0][:4] == [1, 2, 3, 4] and len(stored[rank, 0]) <= 6 for rank in range(2))
    errors = [end["error"] for end in server.run.finishes if end["state"] == "failed"]
    assert any("was killed" in error for error in errors)
    assert sum(end["state"] == "finished" for end in server.run.finishes) == 2


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


@pytest.mark.parametrize(
    "own", [{"RANK": "{rank}", "WORLD_SIZE": "8"}, {"SLURM_PROCID": "{rank}", "SLURM_STEP_NUM_TASKS": "8"}]
)
def test_recognises_ranks_of_slurm(own: dict[str, str]) -> None:
    step = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "16"}
    environments = [step | {name: text.format(rank=rank) for name, text in own.items()} for rank in (0, 7)]
    first, second = map(Job.of, environments)
    assert first.shared_run() == second.shared_run() != ""
    assert [rank_of(environment) for environment in environments] == [first.rank, second.rank] == [0, 7]
    assert Job.of({**environments[0], "SLURM_STEP_ID": "1"}).shared_run() != first.shared_run()
    # Of one process of a step, or of a script that sbatch runs, nothing says that it runs only once.
    assert Job.of({**step, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}).shared_run() == ""
    assert Job.of({"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}).size == 1


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "{rank}",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_MCA_orte_precondition_transports": "e4fb7facdb1a39d2-6f303727a8751732",
    "PMIX_RANK": "{rank}",
    "PMIX_NAMESPACE": "377487361",
}
"""As of Open MPI 4.1."""


def test_recognises_ranks_of_open_mpi() -> None:
    jobs = [Job.of({name: text.format(rank=rank) for name, text in OPEN_MPI.items()}) for rank in range(4)]
    assert [(job.rank, job.size, job.nodes) for job in jobs] == [(rank, 4, 1) for rank in range(4)]
    assert len({job.shared_run() for job in jobs}) == 1
    assert jobs[0].shared_run() not in ("", jobs[0].shared_run(1))
    again = OPEN_MPI | {"OMPI_MCA_orte_precondition_transports": "0000"}
    assert Job.of(again).shared_run() != jobs[0].shared_run()
    # mpirun has started torchrun, or daemons by srun that have variables of their own.
    assert Job.of({**OPEN_MPI, **torchelastic(3)}).rank == 3
    assert Job.of({**OPEN_MPI, "SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "10"}).size == 4


RANK = """
import os
from fp8scope.metadata.launchers import ranks
from fp8scope.process.launch_ranks import Job, rank_of
line = f"{Job.of(os.environ).shared_run()} {rank_of()} {ranks(os.environ)['local_rank']}\\n"
# In one piece: both ranks write to the same pipe.
os.write(1, line.encode())
"""
LAUNCHER = """
import os, subprocess, sys
rank, size, local_rank, local_size = sys.argv[1].split()
ranks = [
    subprocess.Popen(
        [sys.executable, "rank.py"],
        env={**os.environ, rank: str(n), size: "2", local_rank: str(n), local_size: "2"},
    )
    for n in range(2)
]
sys.exit(any(process.wait() for process in ranks))
"""


@pytest.mark.parametrize(
    ("launcher", "variables", "is_shared"),
    [
        ("deepspeed/launcher/launch.py", "RANK WORLD_SIZE LOCAL_RANK LOCAL_SIZE", True),
        ("hydra_pmi_proxy", "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS", True),
        ("mine.py", "RANK WORLD_SIZE LOCAL_RANK LOCAL_SIZE", False),
    ],
)
def test_ranks_of_a_parent_that_is_a_launcher(
    launcher: str, variables: str, is_shared: bool, tmp_path: Path
) -> None:
    """Launchers of DeepSpeed and MPICH name no launch. A shell or another program may start several."""
    path = tmp_path / launcher
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(LAUNCHER)
    (tmp_path / "rank.py").write_text(RANK)
    runs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, launcher, variables],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        )
        lines = [line.split() for line in done.stdout.splitlines()]
        assert sorted(line[-2:] for line in lines) == [["0", "0"], ["1", "1"]]
        runs.append({line[0] for line in lines if len(line) == 3})
        assert len(runs[-1]) == is_shared and ("does not know the run" in done.stderr) is not is_shared
    assert runs[0].isdisjoint(runs[1])


ACCELERATED = """
import fp8scope
run = fp8scope.init(name="accelerated")
for number in range(3):
    with run.step() as step:
        step.log(loss=float(number))
run.finish()
"""


def test_accelerate_launch(server: WireServer, settings: Settings, tmp_path: Path) -> None:
    """The processes of `accelerate launch` are ranks of one run."""
    (tmp_path / "script.py").write_text(ACCELERATED)
    how = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *how.split(), str(tmp_path / "script.py")],
        env=environment(server, settings.directory, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert steps_of(server) == {(0, 0): [1, 2, 3], (1, 0): [1, 2, 3]}
    assert [end["state"] for end in server.run.finishes] == ["finished", "finished"]


STORE = """
import os, sys, torch
from fp8scope.process.launch_ranks import Job
where = {"init_method": "file://" + sys.argv[1], "rank": int(os.environ["RANK"]), "world_size": 2}
torch.distributed.init_process_group("gloo", **where)
job = Job.of(os.environ)
print(job.shared_run(), job.shared_run(1), job.agree("attempt", os.environ["RANK"]))
"""


def test_nodes_agree_through_the_process_group(tmp_path: Path) -> None:
    """Without information from a launcher, both nodes use the values of the first rank to arrive."""
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

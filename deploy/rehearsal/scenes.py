"""The scenes of the rehearsal: each lets one thing fail under load, and mends it.

A scene is a function of the deployment, its load and the seconds of load around the fault. It returns the
moment of CLOCK_MONOTONIC from which recovery counts, and facts for its line.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from deployment import Deployment
from process_commands import WEB_HOSTS
from processes import Process
from servers import wait_for
from training_load import Load

Facts = dict[str, Any]
Scene = Callable[[Deployment, Load, float], tuple[float, Facts]]
OUTAGE_SECONDS = 20.0
DELAY_SECONDS, LOSS = 0.2, 0.05
CLOCK_JUMPS = (3 * 3600, -24 * 3600, 0)


def quiet(deployment: Deployment, load: Load, seconds: float) -> tuple[float, Facts]:
    """Nothing fails."""
    count = "SELECT xact_commit FROM pg_stat_database WHERE datname = 'fp8scope'"
    before = deployment.standby.fetch(count)
    time.sleep(2 * seconds)
    read = f"the standby answers charts: {before} transactions"
    wait_for(lambda: deployment.standby.fetch(count) > before, read)
    return time.monotonic(), {"standby_transactions": deployment.standby.fetch(count) - before}


def delay_and_loss(deployment: Deployment, load: Load, seconds: float) -> tuple[float, Facts]:
    """200 ms each way and 5 % of the packets lost between the training and the server."""
    deployment.network.set_link("training", "app", delay=DELAY_SECONDS, loss=LOSS)
    began = time.monotonic()
    time.sleep(OUTAGE_SECONDS + seconds)
    silence = load.longest_silence(began)
    deployment.network.set_link("training", "app")
    return time.monotonic(), {"delay_s": DELAY_SECONDS, "loss": LOSS, "longest_silence_s": round(silence, 1)}


def cut_training(deployment: Deployment, load: Load, seconds: float) -> tuple[float, Facts]:
    """The network between the training and the server is cut: silence, no reset."""
    deployment.network.set_link("training", "app", is_cut=True)
    time.sleep(OUTAGE_SECONDS)
    deployment.network.set_link("training", "app")
    return time.monotonic(), {"outage_s": OUTAGE_SECONDS}


def partition_primary(deployment: Deployment, load: Load, seconds: float) -> tuple[float, Facts]:
    """The network between the application and the primary is cut, and that of the primary and its standby."""
    for machine in ("app", deployment.standby.machine):
        deployment.network.set_link(machine, deployment.primary.machine, is_cut=True)
    time.sleep(OUTAGE_SECONDS)
    for machine in ("app", deployment.standby.machine):
        deployment.network.set_link(machine, deployment.primary.machine)
    return time.monotonic(), {"outage_s": OUTAGE_SECONDS}


def partition_standby(deployment: Deployment, load: Load, seconds: float) -> tuple[float, Facts]:
    """The standby is cut off from everything: it is late and unreachable. Charts come from the primary."""
    began = time.monotonic()
    for machine in ("app", deployment.primary.machine):
        deployment.network.set_link(machine, deployment.standby.machine, is_cut=True)
    time.sleep(OUTAGE_SECONDS)
    silence = load.longest_silence(began)
    for machine in ("app", deployment.primary.machine):
        deployment.network.set_link(machine, deployment.standby.machine)
    healed = time.monotonic()
    caught_up = wait_for(deployment.is_replicated, "the standby catches up")
    return healed, {"longest_silence_s": round(silence, 1), "standby_caught_up_s": round(caught_up, 1)}


def rolling_restart(deployment: Deployment, load: Load, seconds: float) -> tuple[float, Facts]:
    """A rolling upgrade: migrations, then every web process and worker is replaced, one after the other."""
    began = time.monotonic()
    deployment.prepare()
    for web, host in zip(deployment.webs, WEB_HOSTS, strict=True):
        web.stop()
        web.start()
        deployment.wait_healthy(host)
    for worker in (*deployment.workers, deployment.alerts, deployment.beat):
        worker.stop()
        worker.start()
    ended = time.monotonic()
    silence = load.longest_silence(began)
    return ended, {"upgrade_s": round(ended - began, 1), "longest_silence_s": round(silence, 1)}


def redis_killed(deployment: Deployment, load: Load, seconds: float) -> tuple[float, Facts]:
    """Redis is killed, and started again."""
    began = time.monotonic()
    deployment.redis.process.kill()
    time.sleep(OUTAGE_SECONDS)
    silence = load.longest_silence(began)
    deployment.redis.start()
    return time.monotonic(), {"outage_s": OUTAGE_SECONDS, "longest_silence_s": round(silence, 1)}


def disk_full(deployment: Deployment, load: Load, seconds: float) -> tuple[float, Facts]:
    """The disk of the primary is full, and freed again. If PostgreSQL ends, the keeper starts it."""
    ballast = deployment.primary.directory / "ballast"
    restarts = deployment.primary.process.restarts
    with ballast.open("wb", buffering=0) as file:
        deadline = time.monotonic() + OUTAGE_SECONDS
        while time.monotonic() < deadline:
            try:
                file.write(bytes(1 << 16))
            except OSError:
                # What PostgreSQL frees is filled as well.
                time.sleep(0.05)
    ballast.unlink()
    freed = time.monotonic()
    deployment.primary.wait_ready()
    restarts = deployment.primary.process.restarts - restarts
    return freed, {"outage_s": OUTAGE_SECONDS, "database_restarts": restarts}


def clock_jumps(deployment: Deployment, load: Load, seconds: float) -> tuple[float, Facts]:
    """The clock of a web process, two workers, beat and a rank jumps hours ahead, then a day back."""
    began = time.monotonic()
    for offset in CLOCK_JUMPS:
        deployment.clock.set(offset)
        time.sleep(OUTAGE_SECONDS / 2)
    silence = load.longest_silence(began)
    return time.monotonic(), {"jumps_s": CLOCK_JUMPS, "longest_silence_s": round(silence, 1)}


def failover_asynchronous(deployment: Deployment, load: Load, seconds: float) -> tuple[float, Facts]:
    """The primary dies while its standby is three seconds late: what only the primary had is lost."""
    deployment.network.set_link(deployment.primary.machine, deployment.standby.machine, is_cut=True)
    time.sleep(3)
    began = _lose_primary(deployment)
    return began, {"synchronous": False}


def failover_synchronous(deployment: Deployment, load: Load, seconds: float) -> tuple[float, Facts]:
    """The same with `synchronous_standby_names`: nothing was acknowledged that only the primary had."""
    deployment.network.set_link(deployment.primary.machine, deployment.standby.machine, is_cut=True)
    time.sleep(3)
    began = _lose_primary(deployment)
    return began, {"synchronous": True}


def _lose_primary(deployment: Deployment) -> float:
    """The machine of the primary is gone: silence, then death. Fail over to the standby."""
    old = deployment.primary
    began = time.monotonic()
    for machine in ("app", deployment.standby.machine):
        deployment.network.set_link(machine, old.machine, is_cut=True)
    old.process.kill()
    deployment.fail_over()
    return began


def mend_failover(deployment: Deployment) -> None:
    """The lost machine comes back empty, as a standby."""
    for machine in ("app", deployment.primary.machine):
        deployment.network.set_link(machine, deployment.standby.machine)
    deployment.rejoin()


def prepare_synchronous(deployment: Deployment) -> None:
    """A commit waits until the standby has it. Without a standby it waits as long as that lasts."""
    deployment.primary.configure("synchronous_standby_names", f"ANY 1 ({deployment.standby.machine})")
    wait_for(
        lambda: deployment.primary.fetch("SELECT sync_state = 'quorum' FROM pg_stat_replication"),
        "synchronous replication",
    )


def prepare_clock(deployment: Deployment) -> None:
    """Restart the processes whose clock will jump with a clock that can."""
    for process in _with_clock(deployment):
        process.stop()
        process.environment |= deployment.clock.environment
        process.start()
    deployment.wait_healthy(WEB_HOSTS[0])


def end_clock(deployment: Deployment) -> None:
    for process in _with_clock(deployment):
        process.stop()
        for name in deployment.clock.environment:
            del process.environment[name]
        process.start()
    deployment.wait_healthy(WEB_HOSTS[0])


def _with_clock(deployment: Deployment) -> tuple[Process, ...]:
    return deployment.webs[0], deployment.workers[0], deployment.alerts, deployment.beat


SCENES: dict[str, Scene] = {
    scene.__name__: scene
    for scene in (
        quiet, delay_and_loss, cut_training, partition_primary, partition_standby, rolling_restart,
        redis_killed, disk_full, clock_jumps, failover_asynchronous, failover_synchronous,
    )
}  # fmt: skip
BEFORE = {"clock_jumps": prepare_clock, "failover_synchronous": prepare_synchronous}
AFTER = {
    "clock_jumps": end_clock,
    "failover_asynchronous": mend_failover,
    "failover_synchronous": mend_failover,
}


def play(name: str, deployment: Deployment, load: Load, seconds: float) -> dict[str, Any]:
    """Play a scene under load. Returns its line."""
    if name in BEFORE:
        BEFORE[name](deployment)
    try:
        load.start(deployment.clock.environment if name == "clock_jumps" else None)
        time.sleep(seconds)
        since, facts = SCENES[name](deployment, load, seconds)
        recovery = load.wait_acknowledged(since, f"every rank is acknowledged something after {name}")
        time.sleep(seconds)
        return {"scene": name, **load.end(), "recovery_s": round(recovery, 1), **facts}
    finally:
        load.kill()
        if name in AFTER:
            AFTER[name](deployment)

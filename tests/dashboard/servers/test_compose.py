"""docker-compose.yml is complete and contains no secrets, and its commands work on this machine."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboard.helpers.installation import clean_environment, names_below, status_of
from django.conf import settings
from helpers.waiting import wait_until

from fp8scope_dashboard.embedded.postgres import EmbeddedPostgres
from fp8scope_dashboard.embedded.redis import EmbeddedRedis
from fp8scope_dashboard.servers.children import ALERT_QUEUES, JOB_QUEUES, worker_arguments

ROOT = Path(__file__).resolve().parents[3]
SECRETS = ["POSTGRES_PASSWORD", "REDIS_PASSWORD", "FP8SCOPE_SECRET_KEY", "FP8SCOPE_BASE_URL"]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Commands:
    """The commands of the compose file, with a free port and another data directory."""

    def __init__(self, services: dict[str, Any], data: Path, database_url: str, redis_url: str) -> None:
        self.services = services
        self.data = data
        self.port = free_port()
        self.environment = {
            **clean_environment(),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "DJANGO_SETTINGS_MODULE": "fp8scope_dashboard.settings.base",
            "PYTHONSAFEPATH": "1",
            "FP8SCOPE_DATA_DIR": str(data),
            "DATABASE_URL": database_url,
            "REDIS_URL": redis_url,
            "FP8SCOPE_SECRET_KEY": "k" * 64,
            "FP8SCOPE_BASE_URL": "https://fp8.example.org",
        }

    def adapted(self, command: list[str]) -> list[str]:
        replacements = {"8000": str(self.port), "/data/beat-schedule": str(self.data / "beat-schedule")}
        return [
            replacements.get(word, word).replace("$$", "$").replace("/data", str(self.data))
            for word in command
        ]

    def start(self, service: str) -> subprocess.Popen[bytes]:
        command = self.adapted(self.services[service]["command"])
        return subprocess.Popen(command, env=self.environment, cwd=self.data)

    def healthy(self, service: str) -> bool:
        kind, *test = self.services[service]["healthcheck"]["test"]
        command = self.adapted(test if kind == "CMD" else ["sh", "-c", *test])
        finished = subprocess.run(command, env=self.environment, cwd=self.data, capture_output=True)
        return finished.returncode == 0


@pytest.fixture
def commands(compose: dict[str, Any], tmp_path: Path) -> Iterator[Commands]:
    # Not "data": `adapted` replaces that word of the compose file's paths.
    data = tmp_path / "volume"
    data.mkdir()
    postgres = EmbeddedPostgres(tmp_path / "postgres", durable=False)
    with postgres as database_url, EmbeddedRedis(tmp_path / "redis", durable=False) as redis_url:
        commands = Commands(compose["services"], data, database_url, redis_url)
        prepare = commands.start("prepare")
        assert prepare.wait(120) == 0
        yield commands
    assert names_below(tmp_path) == []


@pytest.mark.slow
def test_it_works(commands: Commands) -> None:
    """Each service starts with its command, passes its health check, and ends on SIGTERM.

    The web server redirects to https, and refuses host names that it does not have.
    """
    running = {name: commands.start(name) for name in ("web", "alerts", "worker", "beat")}
    try:
        for name in running:
            wait_until(lambda name=name: commands.healthy(name), f"{name} is healthy")  # type: ignore[misc]
        assert {name: process.poll() for name, process in running.items()} == dict.fromkeys(running)
        assert status_of(f"http://127.0.0.1:{commands.port}/", host="evil.example") == 400
        with closing(http.client.HTTPConnection("127.0.0.1", commands.port, timeout=60)) as connection:
            connection.request("GET", "/", headers={"Host": "fp8.example.org"})
            assert connection.getresponse().getheader("Location") == "https://fp8.example.org/"
    finally:
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        codes = {name: process.wait(60) for name, process in running.items()}
    assert codes["alerts"] == codes["worker"] == codes["beat"] == 0
    assert not commands.healthy("web")


def test_the_file_contains_no_secrets(compose: dict[str, Any]) -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    defaults = set(re.findall(r"\$\{(\w+):?-", text))
    assert defaults == {"FP8SCOPE_MEMORY", "POSTGRES_MEMORY"}, "the file contains a default password"
    for service in compose["services"].values():
        for name, value in service["environment"].items():
            if re.search("PASSWORD|SECRET|_URL", name):
                # None: passed on from the environment, where it is set.
                assert value is None or re.search(r"\$\{\w+:\?", value), name


def test_the_guide_creates_every_required_secret(compose: dict[str, Any]) -> None:
    required = set(re.findall(r"\$\{(\w+):\?", (ROOT / "docker-compose.yml").read_text()))
    guide = (ROOT / "docs" / "operating.md").read_text()
    assert required == set(SECRETS)
    assert [name for name in required if f"\n{name}=" not in guide] == []


def test_the_example_has_every_variable_and_no_secret(compose: dict[str, Any]) -> None:
    example = (ROOT / ".env.example").read_text()
    optional = {name for name, value in compose["x-dashboard"]["environment"].items() if value is None}
    optional |= set(re.findall(r"\$\{(\w+):-", (ROOT / "docker-compose.yml").read_text()))
    assert dict(re.findall(r"^(\w+)=(.*)$", example, re.MULTILINE)) == {
        **dict.fromkeys(SECRETS, ""),
        "FP8SCOPE_BASE_URL": "https://fp8.example.org",
    }
    assert set(re.findall(r"^#(\w+)=", example, re.MULTILINE)) == optional


def test_every_permanent_service_restarts_and_has_a_health_check(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        if name != "prepare":
            assert service["restart"] == "unless-stopped", name
            assert "healthcheck" in service, name


def test_every_volume_is_named(compose: dict[str, Any]) -> None:
    used = {
        volume.partition(":")[0] for service in compose["services"].values() for volume in service["volumes"]
    }
    folders = {name for name in used if name.startswith("./")}
    assert used - folders == set(compose["volumes"])
    assert all((ROOT / name).exists() for name in folders)


def test_logs_and_memory_are_bounded(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["logging"]["options"]["max-size"], name
        if name != "proxy":
            assert service["deploy"]["resources"]["limits"]["memory"], name
        assert all("size=" in folder for folder in service.get("tmpfs", ())), name


def test_only_the_web_server_is_reachable_and_only_locally(compose: dict[str, Any]) -> None:
    ports = {name: service["ports"] for name, service in compose["services"].items() if "ports" in service}
    assert ports.pop("proxy") == ["80:80", "443:443", "443:443/udp"]
    assert compose["services"]["proxy"]["profiles"] == ["tls"]
    assert ports == {"web": ["127.0.0.1:8000:8000"]}


@pytest.mark.parametrize(("name", "queues"), [("alerts", ALERT_QUEUES), ("worker", JOB_QUEUES)])
def test_the_workers_run_as_in_up(compose: dict[str, Any], name: str, queues: tuple[str, ...]) -> None:
    """Compose and `fp8scope up` use the same queues, the same pool and the same memory limit."""
    compose_command, up_command = compose["services"][name]["command"], worker_arguments(name, queues)
    for option in ("--app", "--queues", "--pool", "--max-memory-per-child"):
        assert compose_command[compose_command.index(option) + 1] == up_command[up_command.index(option) + 1]


def test_every_queue_has_a_worker() -> None:
    assert {queue.name for queue in settings.CELERY_TASK_QUEUES} == {*ALERT_QUEUES, *JOB_QUEUES}

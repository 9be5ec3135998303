"""The agent's settings: from arguments, environment variables, or `fp8scope login`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args
from urllib.parse import urlsplit

from fp8scope.credentials import credentials_path, find_login, read_logins

Mode = Literal["online", "offline", "disabled"]
Console = Literal["rank0", "all", "off"]
TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio", "swanlab", "aim", "accelerate", "lightning")
"""Other trackers whose calls can be captured; `tensorboard` is torch's and tensorboardX' SummaryWriter."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DEFAULT_DIRECTORY = ".fp8scope/spool"
DEFAULT_OVERHEAD = 0.02
"""Largest share of the step time that watching may add."""


forced: dict[str, str] = {}
"""`mode` and `directory` of all runs, whatever is passed to `settings_from`; for `fp8scope replay`."""


class ConfigurationError(ValueError):
    """A setting is invalid; the message names it and says what is accepted."""


class ArgumentTypeError(ConfigurationError, TypeError):
    """A ConfigurationError for a value of the wrong type."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run, fixed at `init`. Times are in seconds, sizes in bytes."""

    url: str = ""
    token: str = field(default="", repr=False)
    directory: Path = Path(DEFAULT_DIRECTORY)
    mode: Mode = "online"
    interval: float = 1.0
    """Steps are sent at least this often."""
    spool_bytes: int = 4 * GIB
    memory_bytes: int = 32 * MIB
    """Upper bound of the memory used while the spool cannot be written."""
    queue_rows: int = 4096
    batch_rows: int = 4096
    batch_bytes: int = 8 * MIB
    connect_timeout: float = 5.0
    read_timeout: float = 30.0
    backoff_base: float = 0.5
    backoff_cap: float = 30.0
    hold_seconds: float = 60.0
    """Retry interval after an error that only a person can fix (a wrong token, a wrong address)."""
    introduce_seconds: float = 2.0
    """A run without any step is registered after this time."""
    heartbeat_seconds: float = 10.0
    fsync_seconds: float = 5.0
    """A machine crash loses at most this much; with 0, each step is on disk before the next one ends."""
    overhead: float | None = DEFAULT_OVERHEAD
    """See `fp8scope.attach`."""
    flight_steps: int = 256
    """Steps that the flight recorder keeps; 0: none. See docs/incidents.md."""
    expert_tensors: int = 2048
    """The most rows of single experts' tensors of a model; beyond it, those of a layer have common rows."""
    device_file: Path | None = None
    """A file in which the cluster writes what it measures of each device; see docs/agent.md."""
    trace_steps: tuple[int, ...] = ()
    """Steps that torch's profiler traces; see `Run.trace_steps`."""
    console: Console = "rank0"
    """Whose output is recorded: that of rank 0, of all ranks, or of none."""
    capture: tuple[str, ...] = TRACKERS
    """The trackers whose calls `fp8scope.attach` and `fp8scope run` record as well."""
    capture_media: bool = True
    """True to record small images, texts, tables and files that these trackers are given, too."""

    def __post_init__(self) -> None:
        """Raise ConfigurationError if a value is invalid; the message never contains the token."""
        for name, value in vars(self).items():
            if name in ("url", "token"):
                if not isinstance(value, str):
                    raise ArgumentTypeError(f"{name} must be a string, got a {type(value).__name__}.")
            elif name == "device_file" and value is None:
                continue
            elif name == "trace_steps":
                if not isinstance(value, tuple) or not all(type(step) is int and step > 0 for step in value):
                    raise ConfigurationError(f"trace_steps must be positive integers, got {value!r:.200}.")
            elif name in ("directory", "device_file"):
                if not isinstance(value, Path):
                    raise ArgumentTypeError(f"{name} must be a Path, got {value!r}.")
            elif name == "mode":
                if not isinstance(value, str) or value not in get_args(Mode):
                    raise ConfigurationError(
                        f"mode must be one of {', '.join(get_args(Mode))}, got {value!r}."
                    )
            elif name == "console":
                check_console(value, "console")
            elif name == "capture_media":
                if not isinstance(value, bool):
                    raise ArgumentTypeError(f"capture_media must be true or false, got {value!r}.")
            elif name == "capture":
                check_capture(value, "capture")
            elif name == "overhead" and value is None:
                continue
            elif isinstance(value, bool) or not isinstance(value, int | float):
                raise ArgumentTypeError(f"{name} must be a number, got {value!r}.")
            elif not value >= 0:
                raise ConfigurationError(f"{name} must not be negative, got {value!r}.")


def settings_from(
    *,
    project: str | None = None,
    url: str | None = None,
    token: str | None = None,
    directory: str | os.PathLike[str] | None = None,
    mode: str | None = None,
    console: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Return the settings of a run.

    `url` and `token` come from the arguments, then from FP8SCOPE_URL and FP8SCOPE_TOKEN, then from the login
    that `fp8scope login` stored (the one for `project` if there are several). Raises ConfigurationError if a
    value is invalid.
    """
    env = os.environ if environment is None else environment
    mode, directory = forced.get("mode", mode), forced.get("directory", directory)
    url = url or env.get("FP8SCOPE_URL", "")
    token = token or env.get("FP8SCOPE_TOKEN", "")
    if not (url and token):
        login = find_login(read_logins(credentials_path(env)), url=url, project=project)
        if login is not None:
            url, token = login.url, token or login.token
    chosen = mode or env.get("FP8SCOPE_MODE") or "online"
    if chosen not in get_args(Mode):
        raise ConfigurationError(f"mode must be one of {', '.join(get_args(Mode))}, got {chosen!r}.")
    return Settings(
        url=check_url(url) if url else "",
        token=check_token(token) if token else "",
        directory=_usable(Path(directory or env.get("FP8SCOPE_DIR") or DEFAULT_DIRECTORY)),
        mode=chosen,  # type: ignore[arg-type]
        interval=_number(env, "FP8SCOPE_INTERVAL", 1.0, low=0.05, high=3600),
        fsync_seconds=_number(env, "FP8SCOPE_FSYNC", 5.0, low=0, high=3600),
        spool_bytes=int(_number(env, "FP8SCOPE_SPOOL_MIB", 4096, low=1, high=1 << 24) * MIB),
        overhead=overhead_from(env.get("FP8SCOPE_OVERHEAD", ""), "FP8SCOPE_OVERHEAD"),
        console=check_console(console or env.get("FP8SCOPE_CONSOLE") or "rank0", "console"),
        capture=capture_from(env),
        capture_media=_switch(env.get("FP8SCOPE_CAPTURE_MEDIA", ""), "FP8SCOPE_CAPTURE_MEDIA"),
        device_file=_usable(Path(device_file)) if (device_file := env.get("FP8SCOPE_DEVICE_FILE")) else None,
        trace_steps=_step_numbers(env.get("FP8SCOPE_TRACE_STEPS", ""), "FP8SCOPE_TRACE_STEPS"),
        expert_tensors=int(_number(env, "FP8SCOPE_EXPERT_TENSORS", 2048, low=0, high=1_000_000)),
        flight_steps=int(_number(env, "FP8SCOPE_FLIGHT_STEPS", 256, low=0, high=1 << 16)),
    )


def overhead_from(text: str, name: str) -> float | None:
    """Parse an overhead budget: a number above 0 and at most 1, or "none". An empty text is the default.

    Raises ConfigurationError, with `name` in its message, on anything else.
    """
    if not text:
        return DEFAULT_OVERHEAD
    if text.lower() == "none":
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value <= 1:
        raise ConfigurationError(
            f'{name} must be a number above 0 and at most 1 (0.02 is 2 %), or "none", got {text!r}.'
        )
    return value


def _step_numbers(text: str, name: str) -> tuple[int, ...]:
    """Parse numbers of steps that commas separate. Raises ConfigurationError on anything else."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(
        part.isdecimal() and part.isascii() and 0 < len(part) < 16 and int(part) > 0 for part in parts
    ):
        raise ConfigurationError(f"{name} must be numbers of steps, as in 100,2000, got {text!r:.200}.")
    return tuple(int(part) for part in parts)


def _switch(text: str, name: str) -> bool:
    """Parse "on" (the default) or "off". Raises ConfigurationError on anything else."""
    if text.lower() not in ("", "on", "off"):
        raise ConfigurationError(f"{name} must be on or off, got {text!r:.100}.")
    return text.lower() != "off"


def check_console(value: object, name: str) -> Console:
    """Return whose output is recorded. Raises ConfigurationError if it is not one of `Console`."""
    for arg in get_args(Console):
        if isinstance(value, str) and value == arg:
            return cast(Console, arg)
    raise ConfigurationError(f"{name} must be one of {', '.join(get_args(Console))}, got {value!r}.")


def capture_from(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the trackers that FP8SCOPE_CAPTURE names: "auto" (all, the default), "none", or names."""
    return check_capture(environment.get("FP8SCOPE_CAPTURE") or "auto", "FP8SCOPE_CAPTURE")


def check_capture(value: object, name: str) -> tuple[str, ...]:
    """Return the trackers that "auto", "none", names with commas between, or a sequence of names stand for.

    Raises ConfigurationError, with `name` in its message, on anything else.
    """
    names = value
    if isinstance(value, str):
        names = [word.strip() for word in value.split(",") if word.strip()] or None
        if names in (["auto"], ["none"]):
            return TRACKERS if names == ["auto"] else ()
    if isinstance(names, list | tuple) and all(tracker in TRACKERS for tracker in names):
        return tuple(tracker for tracker in TRACKERS if tracker in names)
    raise ConfigurationError(
        f'{name} must be "auto", "none", or names of {", ".join(TRACKERS)}, got {value!r:.200}.'
    )


def _usable(directory: Path) -> Path:
    """Return the absolute path of `directory`. Raises ConfigurationError if it cannot be a path."""
    try:
        if "\0" in str(directory):
            raise ValueError("it contains a NUL character")
        return directory.expanduser().absolute()
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigurationError(f"directory cannot be used: {error}.") from None


def check_url(url: str) -> str:
    """Return `url` without a trailing slash. Raises ConfigurationError unless it is
    http(s)://host[:port][/path].
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        shown = url if "@" not in url else "(hidden because it may contain a password)"
        raise ConfigurationError(
            f"url must begin with http:// or https://, as in https://fp8scope.example.org, got {shown!r}."
        )
    if parts.username or parts.password:
        raise ConfigurationError("url must not contain a user name or password; only the token is needed.")
    if parts.query or parts.fragment:
        raise ConfigurationError(f"url must not contain '?' or '#', got {url!r}.")
    return url.rstrip("/")


def check_token(token: str) -> str:
    """Return `token` stripped. Raises ConfigurationError if it is malformed, without showing it."""
    token = token.strip()
    if not token.isascii() or not token.isprintable() or " " in token or not 1 <= len(token) <= 512:
        raise ConfigurationError("token must be a token from the project's settings page (fp8s_...).")
    return token


def _number(env: Mapping[str, str], name: str, default: float, *, low: float, high: float) -> float:
    text = env.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise ConfigurationError(f"{name} must be a number from {low:g} to {high:g}, got {text!r}.")
    return value

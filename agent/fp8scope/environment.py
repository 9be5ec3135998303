"""What a run remembers of the machine and the program, with secrets taken out."""

import importlib.metadata
import math
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REDACTED = "[redacted]"
MAX_TEXT = 4000
MAX_DEPTH = 8
MAX_ITEMS = 2000

_SECRET_NAME = re.compile(
    r"(?i)(token|secret|passw|pwd|api[-_.]?key|access[-_.]?key|private[-_.]?key|credential|auth\b)"
)
# "max_tokens" and "tokenizer" are what language models are made of, not secrets.
_HARMLESS_NAME = re.compile(
    r"(?i)(tokens|tokeni[sz]|token_?(id|count|num|len|per|type|embed)|num_?token|author)"
)
_SECRET_VALUE = re.compile(
    r"\b(?:fp8s_|hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA)[A-Za-z0-9_\-]{8,}|eyJ[\w\-]{8,}\.[\w\-]+\.[\w\-]+"
)
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s@]+@")
_ASSIGNMENT = re.compile(r"([\w.\-]+)(\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;&]+)")


def is_secret_name(name: str) -> bool:
    """Whether something called `name` is likely to be a secret."""
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name)


def redact(text: str) -> str:
    """The text without known kinds of tokens, passwords in addresses, and values assigned to secret names."""
    text = _URL_PASSWORD.sub(f"{REDACTED}@", _SECRET_VALUE.sub(REDACTED, text))
    return _ASSIGNMENT.sub(
        lambda found: found[1] + found[2] + REDACTED if is_secret_name(found[1]) else found[0], text
    )


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line in which the value of `--token X`, `--token=X` and the like is not shown."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        is_option = argument.startswith("-")
        shown.append(REDACTED if hide_next and not is_option else redact(argument))
        hide_next = is_option and "=" not in argument and is_secret_name(argument.lstrip("-"))
    return shown


def plain(value: Any, depth: int = 0) -> Any:
    """`value` as JSON can hold it: bounded, secrets redacted, NaN and infinities as text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return redact(clean(value[:MAX_TEXT]))
    if depth < MAX_DEPTH and isinstance(value, Mapping):
        items = list(value.items())[:MAX_ITEMS]
        return {clean(str(k))[:200]: REDACTED if _hides(str(k), v) else plain(v, depth + 1) for k, v in items}
    if depth < MAX_DEPTH and isinstance(value, list | tuple | set | frozenset):
        return [plain(item, depth + 1) for item in list(value)[:MAX_ITEMS]]
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type) and depth < MAX_DEPTH:
        return plain({name: getattr(value, name) for name in value.__dataclass_fields__}, depth)
    return redact(clean(str(value)[:MAX_TEXT]))


def clean(text: str) -> str:
    """The text without what no database holds: NUL and halves of surrogate pairs."""
    return text.replace("\x00", "").encode("utf-8", "replace").decode()


def _hides(name: str, value: Any) -> bool:
    return is_secret_name(name) and isinstance(value, str | bytes)


def describe_environment() -> dict[str, Any]:
    """Versions, host, GPU, commit and command line. Starts no GPU context: a later fork could not use it."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "fp8scope": version_of("fp8scope"),
        "torch": version_of("torch"),
        "gpu": gpu_name(),
        "git_commit": git_commit(),
        "command": " ".join(redact_arguments(sys.argv))[:MAX_TEXT],
        "working_directory": Path.cwd().name,
    }


def version_of(distribution: str) -> str:
    """The installed version, empty when it is not installed."""
    module = sys.modules.get(distribution)
    if module is not None and hasattr(module, "__version__"):
        return str(module.__version__)
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def gpu_name() -> str:
    """The first NVIDIA GPU's name as its driver tells, empty without one."""
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        found = re.search(r"^Model:\s*(.+)$", path.read_text(errors="replace")[:MAX_TEXT], re.MULTILINE)
        if found:
            return found[1].strip()
    return ""


def git_commit() -> str:
    """The commit of the working directory's repository, empty when there is none."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=2,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()[:64] if found.returncode == 0 else ""

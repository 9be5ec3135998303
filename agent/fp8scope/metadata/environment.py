"""What a run remembers of the machine and the program, with secrets taken out."""

import importlib.metadata
import math
import os
import platform
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
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
    r"\b(?:fp8s_|hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA)[A-Za-z0-9_\-]{8,}|(?<![\w\-])eyJ[\w\-]{8,}\.[\w\-]+\.[\w\-]+"
)
_SECRET_ENTRY = re.compile(
    r"(?i:(?:^|[_\-.\s])(?:key|pass|passphrase|auth|bearer|cookie|dsn|webhook))$|[a-z0-9]Key$"
)
"""Names that only entries of a configuration have, and options: in a program's text `key=` says nothing."""
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s@]+@")
# Possessive, and only from the beginning of a word: a file of one long word must not take for ever.
_ASSIGNMENT = re.compile(r"(?<![\w.\-])([\w.\-]++)(\s*+[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;&]+)")
_PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
)


def is_secret_name(name: str) -> bool:
    """Whether something called `name` is likely to be a secret."""
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name)


def is_secret_entry(name: str, value: Any) -> bool:
    """Whether the configuration's entry `name` is likely to hold a secret. Numbers are none."""
    if value is None or isinstance(value, bool | int | float):
        return False
    if isinstance(value, list | tuple | set | frozenset):
        return any(is_secret_entry(name, one) for one in value)
    if isinstance(value, Mapping):
        return is_secret_name(name) and any(is_secret_entry(name, one) for one in value.values())
    return is_secret_name(name) or bool(_SECRET_ENTRY.search(name))


_concealed: set[str] = set()


def conceal(secrets: Iterable[str]) -> None:
    """Hide these arguments when the command line is described: they were parsed to entries with secrets."""
    _concealed.update(secrets)


def redact(text: str) -> str:
    """The text without known kinds of tokens, passwords in addresses, and values assigned to secret names."""
    text = _PRIVATE_KEY.sub(rf"\1 {REDACTED} \2", text)
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
        name, equals, value = argument.partition("=")
        is_secret = is_secret_entry(name.lstrip("-"), value)
        if argument in _concealed or hide_next and not is_option:
            shown.append(REDACTED)
        elif equals and (value in _concealed or is_option and is_secret):
            shown.append(f"{name}={REDACTED}")
        else:
            shown.append(redact(argument))
        hide_next = is_option and not equals and is_secret
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
        return {
            clean(str(k))[:200]: REDACTED if is_secret_entry(str(k), v) else plain(v, depth + 1)
            for k, v in items
        }
    if depth < MAX_DEPTH and isinstance(value, list | tuple | set | frozenset):
        return [plain(item, depth + 1) for item in list(value)[:MAX_ITEMS]]
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type) and depth < MAX_DEPTH:
        return plain({name: getattr(value, name) for name in value.__dataclass_fields__}, depth)
    return redact(clean(str(value)[:MAX_TEXT]))


def clean(text: str) -> str:
    """The text without what no database holds: NUL and halves of surrogate pairs."""
    return text.replace("\x00", "").encode("utf-8", "replace").decode()


PACKAGES = (
    "fp8scope", "torch", "triton", "torchao", "transformers", "accelerate", "lightning", "transformer_engine",
    "numpy", "pyarrow",
)  # fmt: skip
ALWAYS = ("fp8scope", "torch")
"""Told even where they are not installed, as the empty string."""
MAX_GPUS = 64

JOB_VARIABLES = {
    "rank": ("RANK", "SLURM_PROCID"),
    "local_rank": ("LOCAL_RANK", "SLURM_LOCALID"),
    "world_size": ("WORLD_SIZE", "SLURM_NTASKS"),
    "slurm_job_id": ("SLURM_JOB_ID",),
    "slurm_array_job_id": ("SLURM_ARRAY_JOB_ID",),
    "slurm_array_task_id": ("SLURM_ARRAY_TASK_ID",),
    "slurm_step_id": ("SLURM_STEP_ID",),
    "slurm_job_name": ("SLURM_JOB_NAME",),
    "slurm_cluster": ("SLURM_CLUSTER_NAME",),
    "slurm_nodes": ("SLURM_JOB_NODELIST",),
    "slurm_restarts": ("SLURM_RESTART_COUNT",),
    "pbs_job_id": ("PBS_JOBID",),
    "lsf_job_id": ("LSB_JOBID",),
}
"""What it is called here, and the environment variables that tell it, the first that is set counts."""
MAX_JOB_TEXT = 500
VARIABLES = (
    "CUBLAS_", "CUDA_", "GLOO_", "MKL_", "NCCL_", "NVTE_", "OMP_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_",
    "TRITON_", "UCX_",
)  # fmt: skip
"""What the names of environment variables begin with that change how a training computes."""
MAX_VARIABLES = 100


def describe_environment() -> dict[str, Any]:
    """Versions, host, GPUs, command line, ranks and job. Starts no GPU context: a later fork could not use
    it. What git knows is not in it: see `fp8scope.metadata.git`.
    """
    gpus = gpu_names()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        **{name: version for name in PACKAGES if (version := version_of(name)) or name in ALWAYS},
        **torch_versions(),
        "gpu": gpus[0] if gpus else "",
        "gpus": gpus[:MAX_GPUS],
        "gpu_count": len(gpus),
        "driver": driver_version(),
        **job(os.environ),
        "command": " ".join(redact_arguments(sys.argv))[:MAX_TEXT],
        "working_directory": Path.cwd().name,
        **({"variables": variables} if (variables := training_variables(os.environ)) else {}),
    }


def training_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of the libraries that train, by name; of others nothing is said."""
    names = sorted(name for name in environment if name.startswith(VARIABLES))[:MAX_VARIABLES]
    values: dict[str, str] = plain({name: environment[name][:MAX_JOB_TEXT] for name in names})
    return values


def job(environment: Mapping[str, str]) -> dict[str, str]:
    """This process's place among the ranks and the scheduler's ids of the job; only what is known."""
    found = {
        name: next((environment[v] for v in variables if environment.get(v)), "")
        for name, variables in JOB_VARIABLES.items()
    }
    return {name: redact(clean(value))[:MAX_JOB_TEXT] for name, value in found.items() if value}


def version_of(distribution: str) -> str:
    """The installed version, empty when it is not installed."""
    module = sys.modules.get(distribution)
    if module is not None and hasattr(module, "__version__"):
        return str(module.__version__)
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def torch_versions() -> dict[str, str]:
    """CUDA's (or ROCm's) and cuDNN's versions that torch was built for; nothing unless it is imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    found = {"cuda": torch.version.cuda, "rocm": torch.version.hip}
    if torch.version.cuda is not None:
        found["cudnn"] = torch.backends.cudnn.version()
    return {name: str(version) for name, version in found.items() if version}


def gpu_names(root: Path = Path("/proc/driver/nvidia")) -> list[str]:
    """The machine's NVIDIA GPUs as their driver tells, in its order."""
    names = []
    for path in sorted(root.glob("gpus/*/information")):
        found = re.search(r"^Model:\s*(.+)$", _text_of(path), re.MULTILINE)
        if found:
            names.append(found[1].strip())
    return names


def driver_version(root: Path = Path("/proc/driver/nvidia")) -> str:
    """The NVIDIA driver's version, empty without one."""
    found = re.search(r"Kernel Module\D*([\d.]+)", _text_of(root / "version"))
    return found[1] if found else ""


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:MAX_TEXT]
    except OSError:
        return ""

"""Describes the machine and the process: versions, host, GPUs, command line, ranks and scheduler job."""

import importlib.metadata
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8scope.metadata.launchers import ranks
from fp8scope.metadata.redaction import MAX_TEXT, clean, plain, redact, redact_arguments

PACKAGES = (
    "fp8scope", "torch", "triton", "torchao", "transformers", "accelerate", "lightning", "transformer_engine",
    "numpy", "pyarrow",
)  # fmt: skip
FRAMEWORKS = (
    "composer", "deepspeed", "flax", "jax", "litgpt", "pytorch_lightning", "ray", "torchtitan", "torchtune",
    "trl", "verl",
)  # fmt: skip
"""Recorded only where the program has imported them."""
ALWAYS = ("fp8scope", "torch")
"""Recorded as an empty string if not installed."""
MAX_GPUS = 64

JOB_VARIABLES = {
    "slurm_job_id": "SLURM_JOB_ID",
    "slurm_array_job_id": "SLURM_ARRAY_JOB_ID",
    "slurm_array_task_id": "SLURM_ARRAY_TASK_ID",
    "slurm_step_id": "SLURM_STEP_ID",
    "slurm_job_name": "SLURM_JOB_NAME",
    "slurm_cluster": "SLURM_CLUSTER_NAME",
    "slurm_nodes": "SLURM_JOB_NODELIST",
    "slurm_restarts": "SLURM_RESTART_COUNT",
    "pbs_job_id": "PBS_JOBID",
    "lsf_job_id": "LSB_JOBID",
}
"""Field name and the environment variable to read it from."""
MAX_JOB_TEXT = 500
VARIABLES = (
    "CUBLAS_", "CUDA_", "GLOO_", "MKL_", "NCCL_", "NVTE_", "OMP_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_",
    "TRITON_", "UCX_",
)  # fmt: skip
"""Prefixes of environment variables that change how a training computes."""
MAX_VARIABLES = 100


def describe_environment() -> dict[str, Any]:
    """Return versions, host, GPUs, command line, ranks and scheduler job.

    Does not create a CUDA context, which a later fork could not use. For the repository see `metadata.git`.
    """
    gpus = gpu_names()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        **{name: version for name in PACKAGES if (version := version_of(name)) or name in ALWAYS},
        **{name: version for name in FRAMEWORKS if name in sys.modules and (version := version_of(name))},
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
    """Return the environment variables of training libraries (see VARIABLES), redacted."""
    names = sorted(name for name in environment if name.startswith(VARIABLES))[:MAX_VARIABLES]
    values: dict[str, str] = plain({name: environment[name][:MAX_JOB_TEXT] for name in names})
    return values


def job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return this process's rank and the scheduler's job ids; only those that are set."""
    values = ranks(environment) | {
        name: environment.get(variable, "") for name, variable in JOB_VARIABLES.items()
    }
    return {name: redact(clean(value))[:MAX_JOB_TEXT] for name, value in values.items() if value}


def version_of(distribution: str) -> str:
    """Return the installed version, or an empty string if it is not installed."""
    module = sys.modules.get(distribution)
    if module is not None and hasattr(module, "__version__"):
        return str(module.__version__)
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def torch_versions() -> dict[str, str]:
    """Return the versions of torch's platform and of cuDNN; empty if torch is not imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    names = {"cuda": "cuda", "rocm": "hip", "xpu": "xpu", "musa": "musa"}
    versions = {name: getattr(torch.version, attribute, None) for name, attribute in names.items()}
    if torch.version.cuda is not None:
        versions["cudnn"] = torch.backends.cudnn.version()
    return {name: str(version) for name, version in versions.items() if version}


def gpu_names(root: Path = Path("/proc/driver/nvidia")) -> list[str]:
    """Return the names of the NVIDIA GPUs, read from the driver's /proc files."""
    names = []
    for path in sorted(root.glob("gpus/*/information")):
        model = re.search(r"^Model:\s*(.+)$", _text_of(path), re.MULTILINE)
        if model:
            names.append(model[1].strip())
    return names


def driver_version(root: Path = Path("/proc/driver/nvidia")) -> str:
    """Return the version of the NVIDIA driver, or an empty string without one."""
    version = re.search(r"Kernel Module\D*([\d.]+)", _text_of(root / "version"))
    return version[1] if version else ""


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:MAX_TEXT]
    except OSError:
        return ""

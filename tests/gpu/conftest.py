"""Tests of the kernels on a CUDA device: `make test-gpu`. Without one they are skipped, which one line tells.

`test_triton*.py` also run on a CPU where TRITON_INTERPRET=1 is in the environment, as `tests/kernels` has it.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fp8scope_kernels import set_backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Here and not in the fixture, so that all of them are skipped at one place: that gives one line.
    if not torch.cuda.is_available() and not _is_interpreted(item.path):
        pytest.skip("needs a CUDA device: run make test-gpu on a machine that has one")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the test's tensors are to be."""
    return torch.device("cpu" if _is_interpreted(request.path) else "cuda")


def _is_interpreted(path: Path) -> bool:
    return INTERPRETED and path.name.startswith("test_triton")


@pytest.fixture(autouse=True)
def automatic_backend() -> Iterator[None]:
    """Each test leaves the choice of the backend as it was."""
    yield
    set_backend("auto")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory without a value is filled with NaN, or the largest integer: nothing may rely on it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)

"""What `import fp8scope` loads: little, so that a program which begins no run pays nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

import fp8scope

HEAVY = ("pyarrow", "numpy", "urllib3", "rich", "torch", "fp8scope_kernels")


def loaded_by(program: str) -> set[str]:
    """Which of HEAVY a new process has imported after this program."""
    shown = f"import sys\n{program}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_it_works() -> None:
    assert loaded_by("import fp8scope") == set()


@pytest.mark.parametrize(
    "name", ["init", "attach", "watch", "log", "finish", "integrations", "ConfigurationError"]
)
def test_a_name_that_needs_nothing(name: str) -> None:
    assert loaded_by(f"import fp8scope; fp8scope.{name}") == set()


def test_a_run_without_torch_imports_no_torch() -> None:
    assert loaded_by("import fp8scope; fp8scope.init(mode='disabled')") <= {"numpy", "urllib3"}


WITHOUT_AN_OPTIMIZER = """
import torch, fp8scope
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
run = fp8scope.init(name="by hand", mode="offline", directory={directory!r})
run.watch(model)
for _ in range(3):
    with run.step() as step:
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        step.log(loss=loss)
run.finish()
"""


def test_watching_does_not_load_the_compiler_of_torch(tmp_path: Path) -> None:
    """It takes seconds. A script without an optimizer, or without torch.compile, may never need it."""
    program = WITHOUT_AN_OPTIMIZER.format(directory=str(tmp_path))
    shown = f"import sys\n{program}\nprint('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"], done.stderr


def test_every_public_name_is_there() -> None:
    for name in fp8scope.__all__:
        assert getattr(fp8scope, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fp8scope.nothing  # noqa: B018

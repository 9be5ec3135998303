"""Compiled graphs break at the functions of ours; a process that compiles nothing does not pay for it."""

import subprocess
import sys

import torch

from fp8scope_kernels.torch_internals import break_graph, is_exporting

SCRIPT = """
import sys, torch
from fp8scope_kernels import DelayedScaling, convert
model = torch.nn.Sequential(torch.nn.Linear(16, 16))
convert(model, DelayedScaling())
model(torch.randn(4, 16)).sum().backward()
assert "torch._dynamo" not in sys.modules
"""

calls: list[bool] = []


@break_graph
def noting(x: torch.Tensor) -> torch.Tensor:
    """Twice x."""
    calls.append(torch.compiler.is_compiling())
    return x * 2


def test_it_works() -> None:
    calls.clear()
    compiled = torch.compile(lambda x: noting(x + 1) - 1, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    # A function inside of a graph would have run once, while it was traced.
    assert calls == [False] * 3


def test_eager_calls_are_plain_calls() -> None:
    calls.clear()
    assert noting(torch.ones(1)).item() == 2 and calls == [False]
    assert noting.__name__ == "noting" and noting.__doc__ == "Twice x."


def test_asking_for_an_export_does_not_break_a_graph() -> None:
    compiled = torch.compile(lambda x: x if is_exporting() else x + 1, backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).item() == 2
    assert not is_exporting()


def test_a_training_step_does_not_import_the_compiler() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=120)

"""A training goes on, with the same result, where the environment breaks the agent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "--attach" in sys.argv:
    import fp8scope

    run = fp8scope.attach(model, optimizer, name="x")
    run.on_alert(print)
for batch in run.batches([1, 2]) if "--attach" in sys.argv else [1, 2]:
    loss = model(torch.ones(2, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if "--attach" in sys.argv:
        run.log(batch=batch)
        with run.step() as step:
            step.log(other=1.0)
print(loss.item())
if "--attach" in sys.argv:
    run.summary["loss"] = loss.item()
    assert not run.finish().complete
"""


def broken(folder: Path, *packages: str) -> dict[str, str]:
    """The environment of a process in which these packages cannot be imported."""
    for name in packages:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise ImportError('{name} is of another\\nversion')")
    return {
        **os.environ,
        "PYTHONPATH": str(folder),
        "FP8SCOPE_MODE": "offline",
        "FP8SCOPE_DIR": str(folder / "spool"),
    }


def process(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("way", ["attach", "run"])
def test_it_works(way: str, tmp_path: Path) -> None:
    """One line says why nothing is recorded; results and exit status are those of the script."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = broken(tmp_path / "packages", "urllib3")
    alone = process(str(script), env=env)
    arguments = [str(script), "--attach"] if way == "attach" else ["-m", "fp8scope", "run", str(script)]
    watched = process(*arguments, env=env)
    assert watched.returncode == alone.returncode == 0, watched.stderr
    assert watched.stdout == alone.stdout
    (line,) = [line for line in watched.stderr.splitlines() if "not recorded" in line]
    assert line.startswith(
        "fp8scope: this run is not recorded, because the agent cannot begin (ImportError: urllib3"
    )
    assert "Traceback" not in watched.stderr


def test_no_pyarrow_is_needed(tmp_path: Path) -> None:
    """It refuses to be imported beside an old NumPy, which pip installs with it all the same."""
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT.replace("assert not run.finish()", "report = run.finish()\n    assert not report")
    )
    env = broken(tmp_path / "packages", "pyarrow")
    done = process(str(script), "--attach", env=env)
    assert done.returncode == 0 and "not recorded" not in done.stderr, done.stderr
    assert any(path.is_file() for path in (tmp_path / "packages" / "spool").rglob("*"))


def test_a_script_without_numpy_runs(tmp_path: Path) -> None:
    """`fp8scope run` of a script that imports nothing."""
    script = tmp_path / "hello.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    done = process(
        "-m", "fp8scope", "run", str(script), "--lr", "1", env=broken(tmp_path / "packages", "numpy")
    )
    assert done.returncode == 0 and done.stdout == "['--lr', '1']\n", done.stderr


@pytest.mark.parametrize("package", ["numpy", "urllib3"])
def test_doctor_names_the_package(package: str, tmp_path: Path) -> None:
    done = process("-m", "fp8scope", "doctor", env=broken(tmp_path / "packages", package))
    assert done.returncode == 1
    assert f"{package} cannot be imported: {package} is of another version" in done.stdout
    assert "pip install" in done.stdout and "Traceback" not in done.stderr


def test_a_wrong_argument_is_still_an_error(tmp_path: Path) -> None:
    env = broken(tmp_path / "packages", "pyarrow")
    done = process("-c", "import fp8scope; fp8scope.init(name=3)", env=env)
    assert done.returncode == 1 and "name must be a string" in done.stderr

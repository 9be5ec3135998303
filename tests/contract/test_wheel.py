"""The wheel, built and installed into a clean environment: its content, and that it runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from contract.helpers.quick_compiler import quick_compiler

from fp8scope_kernels.cpu import levels as cpu_levels

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
BUNDLE = Path("dashboard/fp8scope_dashboard/pages/plotly_bundle")
PACKAGES = ("fp8scope", "fp8scope_kernels", "fp8scope_dashboard")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files, so that no old build folder of the checkout gets into the wheel."""
    source = tmp_path_factory.mktemp("source")
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines():
        if name.startswith(("agent/", "build_backend/", "kernels/", "dashboard/")) or "/" not in name:
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    # The build takes plotly's script from the network; what is there already, it leaves.
    bundle = source / BUNDLE
    bundle.mkdir()
    version = re.search(r'VERSION = "(.*)"', (ROOT / "build_backend" / "plotly_bundle.py").read_text())
    assert version is not None
    for name, text in (("plotly.min.js", "script"), ("LICENSE", "MIT"), ("VERSION", version[1])):
        (bundle / name).write_text(text)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source)
    run(*build, cwd=folder, CXX=quick_compiler(folder) or "zig")
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel; dependencies come from the tests' environment."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    interpreter = folder / "venv" / "bin" / "python"
    site = Path(
        run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    )
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        site,
        wheel,
        cwd=folder,
    )
    # Python does not read .pth files in folders that a .pth file adds, so the checkout is not importable.
    (site / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return interpreter


# One program for all questions: each start of Python imports torch anew.
SHOWN = """
import contextlib, io, json, sys
import fp8scope, fp8scope_kernels
without_django = "django" not in sys.modules
from fp8scope.cli.main import main
sys.argv = ["fp8scope", "--help"]
with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
    main()
import torch
from fp8scope_kernels import E4M3, quantize, set_backend
from fp8scope_kernels.cpu import levels
set_backend("compiled")
quantized = quantize(torch.ones(9), torch.tensor(2.0), E4M3).data.float().sum().item()
import fp8scope_dashboard
packages = (fp8scope, fp8scope_kernels, fp8scope_dashboard)
print(json.dumps({
    "files": [package.__file__ for package in packages],
    "without_django": without_django,
    "version": fp8scope.__version__,
    "help": output.getvalue(),
    "sources": [str(path) for path in levels.sources()],
    "quantized": quantized,
}))
"""


@pytest.fixture(scope="module")
def shown(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a program says that runs in the environment of the wheel."""
    read: dict[str, Any] = json.loads(run(python, "-c", SHOWN, cwd=tmp_path_factory.mktemp("shown")))
    return read


def test_it_works(python: Path, shown: dict[str, Any]) -> None:
    assert len(shown["files"]) == len(PACKAGES)
    for package, file in zip(PACKAGES, map(Path, shown["files"]), strict=True):
        assert file.parent.name == package and file.is_relative_to(python.parents[1]), file


def test_every_module_is_in_the_wheel(source: Path, wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("agent/fp8scope", "kernels/fp8scope_kernels", "dashboard/fp8scope_dashboard"):
        root = source / folder
        for file in root.rglob("*"):
            wanted = file.suffix == ".py" or "templates" in file.parts or "static" in file.parts
            if file.is_file() and wanted and "__pycache__" not in file.parts:
                assert str(file.relative_to(root.parent)) in packed


def test_plotlys_script_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        folder = BUNDLE.relative_to("dashboard")
        assert packed.read(str(folder / "plotly.min.js")) == b"script"
        assert str(folder / "LICENSE") in packed.namelist()


def test_installs_only_our_packages(wheel: Path) -> None:
    top_levels = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top_levels if not name.endswith(".dist-info")} == set(PACKAGES)


def test_a_training_machine_needs_no_django(shown: dict[str, Any]) -> None:
    assert shown["without_django"] is True


def test_the_version_is_that_of_pyproject(shown: dict[str, Any]) -> None:
    assert shown["version"] == VERSION


def test_the_command_prints_its_help(shown: dict[str, Any]) -> None:
    assert "usage: fp8scope" in shown["help"]


def test_django_finds_nothing_wrong(python: Path, tmp_path: Path) -> None:
    code = (
        "import os; os.environ['DJANGO_SETTINGS_MODULE'] = 'fp8scope_dashboard.settings.base'; "
        "import django; django.setup(); "
        "from django.core.management import call_command; call_command('check')"
    )
    assert "no issues" in run(python, "-c", code, cwd=tmp_path)


def test_any_python_3_of_this_platform_can_install_it(wheel: Path) -> None:
    """The libraries need only a C library no newer than the platform tag says, and no Python."""
    name, version, python, abi, platform = wheel.stem.split("-")
    assert (name, version, python, abi) == ("fp8scope", VERSION, "py3", "none")
    assert platform == f"manylinux_2_17_{cpu_levels.machine()}"
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"fp8scope-{VERSION}.dist-info/WHEEL").decode()
    assert "Root-Is-Purelib: false" in metadata
    assert f"Tag: py3-none-{platform}" in metadata


def test_the_wheel_contains_a_library_per_level_and_no_sources(wheel: Path) -> None:
    packed = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    libraries = {path.name for path in packed if path.suffix == ".so"}
    assert libraries == {cpu_levels.path(level).name for level in cpu_levels.levels()}
    assert not [path for path in packed if path.suffix in (".cpp", ".h", ".o")]


def test_the_installed_kernels_are_loaded(shown: dict[str, Any]) -> None:
    assert (shown["sources"], shown["quantized"]) == ([], 18.0)


def test_the_source_distribution_contains_all_files_of_the_build(source: Path, tmp_path: Path) -> None:
    run(
        sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, source, cwd=tmp_path
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    for folder, pattern in (("build_backend", "*.py"), ("kernels/fp8scope_kernels/cpu", "**/*")):
        wanted = {file for file in (source / folder).glob(pattern) if file.suffix in (".py", ".cpp", ".h")}
        assert {str(file.relative_to(source)) for file in wanted} <= names
        assert wanted
    assert "setup.py" in names
    assert not [name for name in names if name.endswith(".so")]


def test_a_checkout_in_the_working_directory_hides_no_editable_install(source: Path, tmp_path: Path) -> None:
    """A folder named like the package, without code of its own: the usual name of a checkout."""
    build = (
        "import sys; sys.path.insert(0, 'build_backend'); import backend; backend.build_editable(sys.argv[1])"
    )
    (wheel_folder := tmp_path / "wheel").mkdir()
    # In the copy of the sources, and without compiling the kernels.
    environment = {**os.environ, "FP8SCOPE_BUILD_KERNELS": "0"}
    subprocess.run(
        [sys.executable, "-c", build, str(wheel_folder)], cwd=source, env=environment, check=True, timeout=280
    )
    (wheel,) = wheel_folder.glob("*.whl")
    site = tmp_path / "site"
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--target",
        site,
        wheel,
        cwd=site.parent,
    )
    (tmp_path / "fp8scope" / "agent").mkdir(parents=True)
    code = (
        "import site, sys; site.addsitedir(sys.argv[1]); import fp8scope; print(fp8scope.attach.__module__)"
    )
    # Without the site-packages of the tests, in which the checkout is installed.
    assert run(sys.executable, "-S", "-c", code, site, cwd=tmp_path).strip() == "fp8scope"

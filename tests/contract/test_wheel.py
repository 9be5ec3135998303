"""The wheel, built and installed into a clean environment: its content, and that it runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

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


def test_it_works(python: Path, tmp_path: Path) -> None:
    for package in PACKAGES:
        file = Path(run(python, "-c", f"import {package}; print({package}.__file__)", cwd=tmp_path).strip())
        assert file.is_relative_to(python.parents[1]), file


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


def test_a_training_machine_needs_no_django(python: Path, tmp_path: Path) -> None:
    check = "import sys, fp8scope, fp8scope_kernels; sys.exit('django' in sys.modules)"
    run(python, "-c", check, cwd=tmp_path)


def test_the_version_is_that_of_pyproject(python: Path, tmp_path: Path) -> None:
    assert run(python, "-c", "import fp8scope; print(fp8scope.__version__)", cwd=tmp_path).strip() == VERSION


def test_the_command_prints_its_help(python: Path, tmp_path: Path) -> None:
    code = "import sys; from fp8scope.cli.main import main; sys.argv = ['fp8scope', '--help']; main()"
    assert "fp8scope" in run(python, "-c", code, cwd=tmp_path)


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


def test_the_installed_kernels_are_loaded(python: Path, tmp_path: Path) -> None:
    code = (
        "import torch; from fp8scope_kernels import E4M3, quantize, set_backend; "
        "from fp8scope_kernels.cpu import levels; "
        "assert not levels.sources(); set_backend('compiled'); "
        "print(quantize(torch.ones(9), torch.tensor(2.0), E4M3).data.float().sum())"
    )
    assert run(python, "-c", code, cwd=tmp_path) == "tensor(18.)\n"


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

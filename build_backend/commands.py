"""setuptools commands that build the CPU kernels' libraries and pack them into a wheel for any Python 3."""

import os
import sys
from pathlib import Path

import elf
import kernel_libraries
from setuptools import Extension
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

OLDEST_GLIBC = (2, 17)
"""The oldest glibc to name in a wheel's tag, even if a library would run with an older one."""


def extensions() -> list[Extension]:
    """Return an extension for each library; none with FP8SCOPE_BUILD_KERNELS=0 or on other platforms."""
    if not kernel_libraries.wanted():
        return []
    files = [file.relative_to(kernel_libraries.ROOT).as_posix() for file in kernel_libraries.levels.sources()]
    main = next(file for file in files if file.endswith("/kernels.cpp"))
    return [
        Extension(f"fp8scope_kernels.cpu.{level.module}", [main], depends=files)
        for level in kernel_libraries.levels.levels(kernel_libraries.architecture())
    ]


class BuildKernels(build_ext):  # type: ignore[misc]
    """Builds the libraries with kernel_libraries.py, since distutils can build only Python modules."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the library's name without an ABI tag: it is not a Python module."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extensions(self) -> None:
        work = Path(self.build_temp)
        work.mkdir(parents=True, exist_ok=True)
        kernel_libraries.build(Path(self.get_ext_fullpath(self.extensions[0].name)).parent, work)


class PlatformWheel(bdist_wheel):  # type: ignore[misc]
    """A wheel for this platform and any Python 3: the libraries do not depend on Python."""

    def get_tag(self) -> tuple[str, str, str]:
        if self.root_is_pure:
            python, abi, platform = super().get_tag()
            return python, abi, platform
        platform = str(self.plat_name).replace("-", "_").replace(".", "_")
        if sys.platform == "linux" and not self.plat_name_supplied:
            build = self.get_finalized_command("build_ext")
            platform = linux_platform([Path(name) for name in build.get_outputs()])
        return "py3", "none", platform


def linux_platform(libraries: list[Path]) -> str:
    """Return the wheel's platform: manylinux for the newest glibc needed, or linux if other libraries are."""
    needs = [elf.read(library) for library in libraries if library.exists()]
    if not needs or any(need.libraries - {"libc.so.6", "libm.so.6"} for need in needs):
        return f"linux_{kernel_libraries.architecture()}"
    major, minor = max([OLDEST_GLIBC, *(need.glibc for need in needs)])
    return f"manylinux_{major}_{minor}_{kernel_libraries.architecture()}"

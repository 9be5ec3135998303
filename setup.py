"""Builds the compiled part of the package; everything else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup

# Build frontends add this path (backend-path in pyproject.toml); `python setup.py` does not.
sys.path.insert(0, str(Path(__file__).parent / "build_backend"))

from commands import BuildKernels, PlatformWheel, extensions  # noqa: E402

setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel})

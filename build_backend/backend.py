"""The build backend: setuptools, a compiler from PyPI if the machine has none, and plotly's script."""

import tempfile
from pathlib import Path
from typing import Any

import compilers
import editable
import kernel_libraries
import plotly_bundle
from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


ROOTS = ("agent", "kernels", "dashboard")
"""As `tool.setuptools.packages.find` in pyproject.toml."""


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: Any = None) -> str:
    plotly_bundle.bring()
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    return name


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: Any = None) -> str:
    plotly_bundle.bring()
    name: str = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    folder = kernel_libraries.ROOT.resolve()
    editable.use_search_path(Path(wheel_directory, name), "fp8scope", [folder / root for root in ROOTS])
    return name


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_compiler_requirement()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_compiler_requirement()]


def _compiler_requirement() -> list[str]:
    if not kernel_libraries.wanted():
        return []
    with tempfile.TemporaryDirectory(prefix="fp8scope-") as work:
        return [] if kernel_libraries.find_compiler(Path(work)) else [compilers.ZIG]

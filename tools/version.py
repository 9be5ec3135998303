"""Print the version of pyproject.toml, which is the only place that has it for the package."""

from __future__ import annotations

import tomllib
from pathlib import Path

print(tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["version"])

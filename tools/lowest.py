"""Print the lowest version of each requirement in pyproject.toml, as constraints for pip.

    python tools/lowest.py [EXTRA ...] > lowest.txt
    pip install -c lowest.txt '.[EXTRA,...]'

pip cannot resolve to the lowest versions itself, so nothing would test the lower bounds. Only direct
requirements are constrained; pip chooses what these require in turn. `make lowest` runs the tests so.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
KEPT = {"torch": "2.13.0"}
"""Instead of their lower bounds: torch is too large to fetch a second time, and other wheels depend on it."""
REQUIREMENT = re.compile(
    r"(?P<name>[\w-]+)(\[(?P<extras>[^]]*)\])?(>=(?P<lowest>[\d.]+))?[^;]*(?P<marker>;.*)?"
)


def requirements(extras: Sequence[str], path: Path = PYPROJECT) -> Iterator[str]:
    """The direct requirements of the package with these extras, and of the extras that they name."""
    project = tomllib.loads(path.read_text())["project"]
    pending = [*project["dependencies"]]
    for extra in extras:
        pending += project["optional-dependencies"][extra]
    for requirement in pending:
        match = REQUIREMENT.fullmatch(requirement)
        assert match is not None, requirement
        if match["name"] == project["name"]:
            named = [extra.strip() for extra in match["extras"].split(",")]
            yield from set(requirements(named, path))
        else:
            yield requirement


def lowest(extras: Sequence[str], path: Path = PYPROJECT) -> list[str]:
    """`name==version` for each requirement that has a lower bound, with its marker."""
    lines = set()
    for requirement in requirements(extras, path):
        match = REQUIREMENT.fullmatch(requirement)
        assert match is not None
        version = KEPT.get(match["name"], match["lowest"])
        if version is not None:
            lines.add(f"{match['name']}=={version}{match['marker'] or ''}")
    return sorted(lines)


if __name__ == "__main__":
    print(*lowest(sys.argv[1:]), sep="\n")

"""The traces of steps that a run has linked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import unquote, urlsplit

from fp8scope_dashboard.runs.models import Artefact, Run, Writer

SUFFIXES: Final = (".json.gz", ".json", ".pftrace", ".perfetto-trace")
MAX_TRACES: Final = 64


@dataclass(frozen=True, kw_only=True)
class LinkedTrace:
    """A trace of a step. `path` is on `hostname`; `address` is that of a trace that a browser can fetch."""

    name: str
    step: int | None
    path: str
    hostname: str
    address: str


def traces_of(run: Run) -> list[LinkedTrace]:
    """Return the artefacts of a run that are traces, by step: their names begin so, or their files end so."""
    links = [link for link in Artefact.objects.filter(run=run) if _is_trace(link)]
    links.sort(key=lambda link: (link.step is None, link.step or 0, link.name))
    hosts = _hosts(run, links[:MAX_TRACES])
    return [
        LinkedTrace(
            name=link.name,
            step=link.step,
            path="" if link.is_web else _path(link.address),
            hostname=hosts.get(str(link.writer), ""),
            address=link.address if link.is_web else "",
        )
        for link in links[:MAX_TRACES]
    ]


def _is_trace(link: Artefact) -> bool:
    named = link.name.lower().startswith("trace")
    return named and urlsplit(link.address).path.lower().endswith(SUFFIXES)


def _hosts(run: Run, links: Sequence[Artefact]) -> dict[str, str]:
    if not links:
        return {}
    return {str(uuid): host for uuid, host in Writer.objects.filter(run=run).values_list("uuid", "hostname")}


def _path(address: str) -> str:
    parts = urlsplit(address)
    return str(PurePosixPath(unquote(parts.path))) if parts.scheme == "file" else address

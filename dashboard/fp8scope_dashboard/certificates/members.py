"""The runs of a certificate, as Python values and as the JSON that a certificate carries."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fp8scope_dashboard.analysis.loss_coverage import RunStanding
from fp8scope_dashboard.analysis.losses.alignment import LossCurve
from fp8scope_dashboard.certificates.errors import CertificateError
from fp8scope_dashboard.statistics.arrays import Floats

MAX_POINTS: Final = 4_000_000
"""The most points of one curve."""
MAX_TEXT: Final = 512
STATES: Final = ("running", "finished", "failed", "silent")
ARRAYS: Final = ("steps", "losses", "tokens", "data_hash")
FACTS: Final = ("seed", "group", "precision", "recipe", "config_digest", "environment", "started_at")


@dataclass(frozen=True, kw_only=True)
class Member:
    """A run of a certificate.

    Attributes:
        curve: its loss; `curve.name` is the run's name.
        standing: its state, and how far it came.
        id: of the run on its server; empty for a curve from a file.
        facts: what else is known, under names of FACTS.
    """

    curve: LossCurve
    standing: RunStanding
    id: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def as_document(member: Member) -> dict[str, Any]:
    """Return a run as JSON types, with digests of its arrays.

    Raises CertificateError for counts that `from_document` would refuse: JSON's numbers are exact below 2^53.
    """
    curve, standing = member.curve, member.standing
    counts = (standing.reached, standing.planned, standing.dropped, curve.planned)
    if any(value is not None and not _is_count(value) for value in counts):
        raise CertificateError(f"a number of steps of the run {curve.name[:MAX_TEXT]!r} is 2^53 or more")
    arrays = {name: values for name in ARRAYS if (values := getattr(curve, name)) is not None}
    return {
        "name": curve.name[:MAX_TEXT],
        "id": member.id,
        "state": standing.state,
        "reached": standing.reached,
        "planned": standing.planned,
        "dropped": standing.dropped,
        "schedule_ends": curve.planned,
        "facts": {name: member.facts[name] for name in FACTS if name in member.facts},
        "points": len(curve),
        "arrays": {name: _packed(values) for name, values in arrays.items()},
        "sha256": {name: hashlib.sha256(_bytes(values)).hexdigest() for name, values in arrays.items()},
    }


def from_document(document: Any) -> Member:
    """Read what `as_document` has made. Raises CertificateError if it cannot be one."""
    try:
        points = document["points"]
        if not _is_count(points) or not 0 < points <= MAX_POINTS:
            raise CertificateError(f"a curve has {points!r} points, and not 1 to {MAX_POINTS:,}")
        arrays = {name: _unpacked(document["arrays"][name], points, name) for name in document["arrays"]}
        if not {"steps", "losses"} <= set(arrays) <= set(ARRAYS):
            raise CertificateError(f"a curve has the arrays {sorted(arrays)!r:.200}")
        for name, values in arrays.items():
            if hashlib.sha256(_bytes(values)).hexdigest() != document["sha256"][name]:
                raise CertificateError(f"the digest of {name} is another")
        state, facts = document["state"], document["facts"]
        if state not in STATES or not isinstance(facts, dict) or not set(facts) <= set(FACTS):
            raise CertificateError("the state or the facts of a run are none that a certificate has")
        counts = {name: document[name] for name in ("reached", "planned", "dropped", "schedule_ends")}
        if any(value is not None and not _is_count(value) for value in counts.values()):
            raise CertificateError("a number of steps is none")
        curve = LossCurve(
            steps=arrays["steps"].astype(np.int64),
            losses=arrays["losses"],
            tokens=arrays.get("tokens"),
            data_hash=arrays.get("data_hash"),
            planned=counts["schedule_ends"],
            name=str(document["name"])[:MAX_TEXT],
        )
        standing = RunStanding(
            state=state,
            reached=counts["reached"],
            planned=counts["planned"],
            dropped=counts["dropped"] or 0,
        )
        return Member(curve=curve, standing=standing, id=str(document["id"])[:MAX_TEXT], facts=facts)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CertificateError(f"a run of the certificate is damaged: {type(error).__name__}") from None


def _bytes(values: Any) -> bytes:
    """The values as little-endian float64, in which steps and hashes below 2^53 are exact."""
    return np.ascontiguousarray(values, "<f8").tobytes()


def _packed(values: Any) -> str:
    return base64.b64encode(zlib.compress(_bytes(values), 6)).decode("ascii")


def _unpacked(text: Any, points: int, name: str) -> Floats:
    if not isinstance(text, str):
        raise CertificateError(f"the array {name!r:.80} is not a text")
    try:
        packed = base64.b64decode(text, validate=True)
        inflater = zlib.decompressobj()
        # A small file must not become a large one in memory.
        raw = inflater.decompress(packed, 8 * points + 1)
        is_whole = inflater.eof and not inflater.unused_data
    except (ValueError, zlib.error):
        raise CertificateError(f"the array {name!r:.80} is damaged") from None
    if not is_whole or len(raw) != 8 * points:
        raise CertificateError(f"the array {name!r:.80} has another length")
    values = np.frombuffer(raw, "<f8").astype(np.float64)
    if name == "steps" and not _are_steps(values):
        raise CertificateError("the steps of a curve do not ascend")
    return values


def _are_steps(values: Floats) -> bool:
    is_exact = bool((np.abs(values) < 2**53).all()) and bool((values == np.floor(values)).all())
    return is_exact and bool((np.diff(values) > 0).all())


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53

"""The file of a certificate: made from two arms of runs, and read with bounds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fp8scope_dashboard.analysis.losses.result import METHOD_VERSION
from fp8scope_dashboard.certificates.claim import Terms, judge
from fp8scope_dashboard.certificates.errors import CertificateError
from fp8scope_dashboard.certificates.members import Member, as_document
from fp8scope_dashboard.certificates.signing import sign

FORMAT: Final = "fp8scope certificate"
FORMAT_VERSION: Final = 1
MAX_BYTES: Final = 512 << 20
ENTRIES: Final = frozenset(
    {
        "format",
        "format_version",
        "made_at",
        "fp8scope",
        "method_version",
        "names",
        "terms",
        "claim",
        "arms",
        "signature",
    }
)


def make(
    ours: Sequence[Member],
    theirs: Sequence[Member],
    terms: Terms,
    key: Ed25519PrivateKey,
    *,
    names: tuple[str, str],
    server: str = "",
) -> dict[str, Any]:
    """Judge two arms, and return the signed certificate.

    Args:
        names: of the judged arm and of the baseline.
        server: address of the server that has the runs; empty for curves from a file.
    """
    document = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "fp8scope": version("fp8scope"),
        "method_version": METHOD_VERSION,
        "names": {"judged": names[0], "baseline": names[1], "server": server},
        "terms": terms.as_dict(),
        "claim": judge(ours, theirs, terms),
        "arms": {
            "judged": [as_document(member) for member in ours],
            "baseline": [as_document(member) for member in theirs],
        },
    }
    return sign(json.loads(json.dumps(document, allow_nan=False)), key)


def as_text(document: dict[str, Any]) -> str:
    """Return the certificate as the text of its file."""
    return json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n"


def parse(raw: bytes) -> dict[str, Any]:
    """Read a certificate's text. Raises CertificateError if it is none of a version that is known."""
    if len(raw) > MAX_BYTES:
        raise CertificateError(f"the file is larger than {MAX_BYTES >> 20} MiB")
    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CertificateError):
            raise
        raise CertificateError("the file is not JSON") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CertificateError("the file is not a certificate of fp8scope")
    if document.get("format_version") != FORMAT_VERSION:
        raise CertificateError(
            f"the certificate has the format version {document.get('format_version')!r:.20}; this fp8scope "
            f"reads {FORMAT_VERSION}: use the version that made it, {document.get('fp8scope')!r:.40}"
        )
    if set(document) != ENTRIES:
        raise CertificateError("the certificate has entries too many, or too few")
    return document


def read(path: Path) -> dict[str, Any]:
    """Read a certificate's file. Raises CertificateError."""
    try:
        with path.open("rb") as file:
            return parse(file.read(MAX_BYTES + 1))
    except OSError as error:
        raise CertificateError(f"{path}: {error.strerror or error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two entries of one name would mean different things to different readers."""
    names = dict(pairs)
    if len(names) != len(pairs):
        raise CertificateError("the file has two entries of the same name")
    return names


def _refuse(constant: str) -> Any:
    raise CertificateError(f"the file has the number {constant}, which JSON does not have")

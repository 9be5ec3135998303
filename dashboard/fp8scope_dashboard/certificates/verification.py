"""Check a certificate without a server: its signature, its curves, and the verdict that follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from fp8scope_dashboard.analysis.losses.result import METHOD_VERSION
from fp8scope_dashboard.certificates.claim import MAX_ARM, Terms, judge
from fp8scope_dashboard.certificates.errors import CertificateError
from fp8scope_dashboard.certificates.members import Member, from_document
from fp8scope_dashboard.certificates.signing import check_signature

TOLERANCE: Final = 1e-6
"""Relative: another processor, or another version of numpy, adds in another order."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The content of a valid certificate.

    Attributes:
        signer: fingerprint of the key.
        claim: computed again from the curves.
        note: a difference to the certificate that does not make it invalid; empty if there is none.
    """

    signer: str
    claim: dict[str, Any]
    note: str = ""


def verify(document: dict[str, Any], *, signer: str = "") -> Verification:
    """Check the signature, compute the verdict again, and compare.

    Args:
        document: from `document.parse`.
        signer: the fingerprint that the certificate must have, or its first 16 or more digits; empty for any.

    Raises:
        CertificateError: changed after it was signed, signed by somebody else, or the curves do not give the
            verdict that it claims.
    """
    fingerprint = check_signature(document)
    wanted = signer.strip().lower()
    if wanted and (len(wanted) < 16 or not fingerprint.startswith(wanted)):
        raise CertificateError(f"the certificate is signed by {fingerprint}, not by {signer!r:.80}")
    arms = document["arms"]
    if not isinstance(arms, dict) or set(arms) != {"judged", "baseline"}:
        raise CertificateError("the certificate has other arms than judged and baseline")
    ours, theirs = (_members(arms[name]) for name in ("judged", "baseline"))
    claim = judge(ours, theirs, Terms.from_dict(document["terms"]))
    return Verification(signer=fingerprint, claim=claim, note=_compare(document, claim))


def _members(documents: Any) -> list[Member]:
    if not isinstance(documents, list) or not 1 <= len(documents) <= MAX_ARM:
        raise CertificateError(f"an arm has no runs, or more than {MAX_ARM}")
    return [from_document(document) for document in documents]


def _compare(document: dict[str, Any], claim: dict[str, Any]) -> str:
    claimed = document["claim"]
    if not isinstance(claimed, dict) or "verdict" not in claimed:
        raise CertificateError("the certificate claims nothing")
    if claimed["verdict"] != claim["verdict"]:
        raise CertificateError(
            f"the curves give the verdict {claim['verdict']!r}, and the certificate claims "
            f"{claimed['verdict']!r:.40}{_made_by(document)}"
        )
    if document["method_version"] != METHOD_VERSION:
        return (
            f"Computed again with another version of the method: the verdict is the same{_made_by(document)}."
        )
    if (entry := _difference(claimed, claim)) is not None:
        raise CertificateError(f"the curves do not give what the certificate claims of {entry!r:.80}")
    return ""


def _made_by(document: dict[str, Any]) -> str:
    if document["method_version"] == METHOD_VERSION:
        return ""
    made_by, method = document["fp8scope"], document["method_version"]
    return f" (made by fp8scope {made_by!r:.40}, version {method!r:.20} of the method)"


def _difference(claimed: Any, computed: Any, where: str = "claim") -> str | None:
    """Return the first entry in which two values differ by more than rounding; None if there is none."""
    if isinstance(computed, dict):
        if not isinstance(claimed, dict) or set(claimed) != set(computed):
            return where
        pairs = [(claimed[name], computed[name], str(name)) for name in computed]
    elif isinstance(computed, list | tuple):
        if not isinstance(claimed, list) or len(claimed) != len(computed):
            return where
        pairs = [(left, right, where) for left, right in zip(claimed, computed, strict=True)]
    elif isinstance(computed, float) and isinstance(claimed, int | float) and not isinstance(claimed, bool):
        is_equal = math.isclose(float(claimed), computed, rel_tol=TOLERANCE, abs_tol=1e-12)
        return None if is_equal else where
    else:
        return None if claimed == computed and type(claimed) is type(computed) else where
    return next((name for pair in pairs if (name := _difference(*pair)) is not None), None)

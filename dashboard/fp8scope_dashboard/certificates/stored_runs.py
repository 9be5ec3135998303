"""The arms of a certificate from runs that this server stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings

from fp8scope_dashboard.analysis import comparison_runs
from fp8scope_dashboard.analysis.loss_comparisons import planned_curve, project_prior
from fp8scope_dashboard.analysis.reading import read_arms
from fp8scope_dashboard.analysis.verdict_coverage import standing_facts
from fp8scope_dashboard.certificates.claim import Terms
from fp8scope_dashboard.certificates.document import make
from fp8scope_dashboard.certificates.errors import CertificateError
from fp8scope_dashboard.certificates.members import Member
from fp8scope_dashboard.certificates.signing import key_from_seed
from fp8scope_dashboard.runs.models import Run

# Separates this use of the secret key from all others: a change changes the server's fingerprint.
PURPOSE = b"fp8scope: certificates, version 1"
# What of an environment matters to a reader; other entries name machines and people.
ENVIRONMENT = ("fp8scope", "python", "torch", "torchao", "transformer_engine", "triton", "cuda", "cudnn")


def server_key() -> Ed25519PrivateKey:
    """Return this server's key, which follows from its secret key."""
    if getattr(settings, "SECRET_KEY_IS_RANDOM", False):
        raise CertificateError("set FP8SCOPE_SECRET_KEY: certificates are signed with a key derived from it")
    derived = HKDF(algorithm=SHA256(), length=32, salt=None, info=PURPOSE)
    return key_from_seed(derived.derive(settings.SECRET_KEY.encode()))


def certificate_of(
    run: Run,
    *,
    server: str,
    baseline_name: str = "",
    margin: float | None = None,
    margin_nats: float | None = None,
) -> dict[str, Any]:
    """Judge a run and its seeds against their baseline, and return the signed certificate.

    The curves, the spread between seeds and the level are those of the run's page. Without a margin, so is
    the margin. `baseline_name`: the group or id of other runs to compare with; empty for the run's baseline.

    Raises CertificateError: the run has no baseline, or the server no key.
    """
    arm = [run, *comparison_runs.siblings(run)]
    run.baseline = baseline_name or run.baseline
    among = {member.id for member in arm}
    baseline = [member for member in comparison_runs.baseline_runs(run) if member.id not in among]
    if not baseline:
        raise CertificateError("the run has no baseline that is stored: there is nothing to compare it with")
    mine, others = read_arms([member.id for member in arm], [member.id for member in baseline])
    reached = comparison_runs.reached_steps([*arm, *baseline])
    terms = Terms(
        margin=run.equivalence_margin if margin is None else margin,
        margin_nats=margin_nats,
        alpha=run.project.alpha,
        prior=project_prior(run),
    )

    def members(runs: Sequence[Run], readings: Sequence[Any]) -> list[Member]:
        return [
            Member(
                curve=planned_curve(reading.curve, member),
                standing=standing_facts(member, reached),
                id=str(member.id),
                facts=_facts(member),
            )
            for member, reading in zip(runs, readings, strict=True)
        ]

    names = run.group or run.name, comparison_runs.baseline_label(run)
    arms = members(arm, mine), members(baseline, others)
    return make(*arms, terms, server_key(), names=names, server=server)


def _facts(run: Run) -> dict[str, Any]:
    environment = run.environment if isinstance(run.environment, dict) else {}
    return {
        "seed": run.seed,
        "group": run.group,
        "precision": run.precision,
        "recipe": run.recipe,
        "config_digest": run.config_digest,
        "environment": {name: environment[name] for name in ENVIRONMENT if name in environment},
        "started_at": run.created_at.isoformat(timespec="seconds"),
    }

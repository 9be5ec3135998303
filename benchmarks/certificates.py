"""How often a certificate of equivalence is wrong on public runs, and the time to make and verify one.

    python benchmarks/certificates.py --curves DIRECTORY [--seconds 300] [--trials 40] [--group PART]

DIRECTORY: as for `verdicts.py`. In each group of equal runs, arms are drawn, and the losses of the judged one
are raised by exactly the margin: 'equivalent' is then wrong. Prints one JSON line per group, mode and kind of
margin:

    group, verdict      of `verdicts.py`
    margin              per cent of the loss, or nats, as the certificate was asked for
    trials              certificates under a harm of the margin, each made, verified and read again
    wrong               share of them whose outcome is 'pass'
    passes              share of as many certificates of the arms as they are whose outcome is 'pass'
    mib                 size of a certificate

and then one line of the largest certificate of all:

    make_s, verify_s, page_s   seconds to judge, sign and write; to parse, check and judge again; for the page
    points, runs               of its curves
    tampered, refused          copies with one value or byte changed, and those that are refused
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from verdicts import MODES, read_groups

from fp8scope_dashboard.analysis.loss_coverage import RunStanding
from fp8scope_dashboard.analysis.losses.alignment import LossCurve
from fp8scope_dashboard.certificates.claim import Terms
from fp8scope_dashboard.certificates.document import as_text, make, parse
from fp8scope_dashboard.certificates.errors import CertificateError
from fp8scope_dashboard.certificates.members import Member
from fp8scope_dashboard.certificates.signing import key_from_seed
from fp8scope_dashboard.certificates.verification import verify
from fp8scope_dashboard.pages.certificate.sheet import sheet

KEY, SEED = key_from_seed(bytes(range(32))), 0
GROUP_RUNS = 7
TERMS = (Terms(margin=0.0025), Terms(margin=0.01), Terms(margin_nats=0.01))
TAMPERED = 1_000


def member(curve: LossCurve, name: str) -> Member:
    """A finished run with this loss."""
    last = int(curve.steps[-1])
    standing = RunStanding(state="finished", reached=last, planned=None)
    return Member(curve=replace(curve, name=name), standing=standing)


def certified(ours: Sequence[LossCurve], theirs: Sequence[LossCurve], terms: Terms) -> dict[str, Any]:
    judged, baseline = (
        [member(curve, f"{name} {index}") for index, curve in enumerate(curves)]
        for name, curves in (("judged", ours), ("baseline", theirs))
    )
    return make(judged, baseline, terms, KEY, names=("judged", "baseline"))


def outcome(document: dict[str, Any]) -> str:
    """The outcome of a certificate that was written, read and verified."""
    return str(verify(parse(as_text(document).encode())).claim["outcome"])


def harmed(curves: Sequence[LossCurve], terms: Terms) -> list[LossCurve]:
    """The curves, raised by the margin."""
    if terms.margin_nats is None:
        return [replace(curve, losses=curve.losses * (1.0 + terms.margin)) for curve in curves]
    return [replace(curve, losses=curve.losses + terms.margin_nats) for curve in curves]


def group_line(
    name: str, curves: Sequence[LossCurve], mode: tuple[int, int], terms: Terms, most: int, seconds: float
) -> dict[str, Any]:
    chance = np.random.default_rng(SEED)
    wrong = passes = trials = size = 0
    began = time.perf_counter()
    while trials < most and (not trials or time.perf_counter() - began < seconds):
        trials += 1
        drawn = [curves[index] for index in chance.permutation(len(curves))[: sum(mode)]]
        ours, theirs = drawn[: mode[0]], drawn[mode[0] :]
        passes += outcome(certified(ours, theirs, terms)) == "pass"
        document = certified(harmed(ours, terms), theirs, terms)
        size = max(size, len(as_text(document)))
        wrong += outcome(document) == "pass"
    return {
        "group": name,
        "verdict": f"{mode[0]}v{mode[1]}",
        "margin": f"{100 * terms.margin:g} %" if terms.margin_nats is None else f"{terms.margin_nats:g} nats",
        "trials": trials,
        "wrong": round(wrong / trials, 4),
        "passes": round(passes / trials, 4),
        "mib": round(size / 2**20, 3),
    }


def cost_line(curves: Sequence[LossCurve]) -> dict[str, Any]:
    """The cost of one certificate, and the changed copies of it that are refused."""
    half = min(len(curves) // 2, 32)
    ours, theirs = curves[:half], curves[half : 2 * half]
    began = time.perf_counter()
    document = certified(ours, theirs, TERMS[0])
    text = as_text(document)
    made = time.perf_counter()
    verify(parse(text.encode()))
    verified = time.perf_counter()
    sheet(document)
    shown = time.perf_counter()
    return {
        "make_s": round(made - began, 3),
        "verify_s": round(verified - made, 3),
        "page_s": round(shown - verified, 3),
        "points": sum(len(curve) for curve in (*ours, *theirs)),
        "runs": 2 * half,
        "tampered": TAMPERED,
        "refused": sum(is_refused(changed) for changed in tampered(text)),
    }


def tampered(text: str) -> list[bytes]:
    """Copies with one character changed, outside of the white space between values."""
    chance = random.Random(SEED)
    copies: list[bytes] = []
    while len(copies) < TAMPERED:
        at = chance.randrange(len(text))
        put = chr(chance.randrange(33, 127))
        if not text[at].isspace() and put != text[at]:
            copies.append((text[:at] + put + text[at + 1 :]).encode())
    return copies


def is_refused(raw: bytes) -> bool:
    try:
        verify(parse(raw))
    except CertificateError:
        return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--curves", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--group", default="", help="only the groups with this part in their name")
    options = parser.parse_args()
    groups, _ = read_groups(options.curves, GROUP_RUNS)
    lines: list[Callable[[float], dict[str, Any]]] = [
        lambda seconds, name=name, curves=curves, mode=mode, terms=terms: group_line(  # type: ignore[misc]
            name, curves, mode, terms, options.trials, seconds
        )
        for name, curves in groups.items()
        if options.group in name
        for mode in MODES
        for terms in TERMS
        if len(curves) >= sum(mode)
    ]
    ends = time.perf_counter() + options.seconds
    for index, line in enumerate(lines):
        print(json.dumps(line((ends - time.perf_counter()) / (len(lines) - index))), flush=True)
    largest = max(groups.values(), key=lambda curves: sum(len(curve) for curve in curves))
    print(json.dumps(cost_line(largest)), flush=True)


if __name__ == "__main__":
    main()

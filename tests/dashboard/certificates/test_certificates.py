"""A certificate carries what its verdict was computed from, and is refused once anything in it changes."""

from __future__ import annotations

import base64
import copy
import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dashboard.helpers.certified_arms import KEY, POINTS, arms, certificate, member

from fp8scope_dashboard.analysis.losses.seeds import Prior
from fp8scope_dashboard.analysis.losses.verdict import compare_losses
from fp8scope_dashboard.certificates.claim import Terms, outcome_of
from fp8scope_dashboard.certificates.document import as_text, make, parse
from fp8scope_dashboard.certificates.errors import CertificateError
from fp8scope_dashboard.certificates.members import as_document, from_document
from fp8scope_dashboard.certificates.signing import check_signature, fingerprint, key_from_seed, sign
from fp8scope_dashboard.certificates.verification import verify

OTHER_KEY = key_from_seed(bytes(32))


def changed(document: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(document)


@pytest.mark.parametrize(
    ("harm", "verdict", "outcome"),
    [(0.0, "equivalent", "pass"), (0.01, "worse", "fail"), (-0.01, "better", "pass")],
)
def test_it_works(harm: float, verdict: str, outcome: str) -> None:
    document = parse(as_text(certificate(harm)).encode())
    verification = verify(document, signer=fingerprint(KEY)[:16])
    assert verification.signer == fingerprint(KEY) and verification.note == ""
    claim = document["claim"]
    assert (claim["verdict"], claim["outcome"]) == (verdict, outcome)
    ours, theirs = arms(harm)
    expected = compare_losses(
        [run.curve for run in ours], [run.curve for run in theirs], margin=0.0025, alpha=0.05
    )
    assert claim["delta"] == expected.delta and tuple(claim["interval"]) == expected.interval
    assert claim["smallest_detectable"] == expected.smallest_detectable
    assert "no evaluation" in claim["not_judged"][0] and claim["looks"].startswith("The interval over seeds")


@pytest.mark.parametrize("field", ["reached", "planned", "dropped"])
def test_what_could_not_be_read_again_is_not_written(field: str) -> None:
    original = member(3)
    counts: dict[str, Any] = {field: 2**53}
    written = replace(original, standing=replace(original.standing, **counts))
    with pytest.raises(CertificateError, match="2\\^53"):
        as_document(written)


def test_the_curves_are_exact() -> None:
    original = member(3)
    broken = np.where(original.curve.steps % 50 == 0, np.nan, original.curve.losses)
    broken[7] = np.inf
    tokens = (original.curve.steps * 4096).astype(np.float64)
    hashes = np.floor(original.curve.losses * 2**50)
    curve = replace(original.curve, losses=broken, tokens=tokens, data_hash=hashes)
    read = from_document(json.loads(json.dumps(as_document(replace(original, curve=curve)))))
    assert read.curve.tokens is not None and read.curve.data_hash is not None
    for before, after in (
        (curve.steps, read.curve.steps),
        (broken, read.curve.losses),
        (tokens, read.curve.tokens),
        (hashes, read.curve.data_hash),
    ):
        assert np.array_equal(before, after, equal_nan=True)
    assert (read.curve.planned, read.standing) == (curve.planned, original.standing)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    else:
        yield path


def another(value: Any, chance: random.Random) -> Any:
    """A value that is not the given one, and looks like it."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + chance.choice([1, -1, 1e-9, value or 1])
    if isinstance(value, str) and value:
        at = chance.randrange(len(value))
        return value[:at] + chance.choice([c for c in "aZ09+/" if c != value[at]]) + value[at + 1 :]
    return "added"


def test_a_thousand_changed_files_are_refused() -> None:
    """Any value changed, removed or doubled, any byte changed, arms exchanged: none is taken."""
    chance, document = random.Random(7), certificate()
    text, paths = as_text(document), list(leaves(document))
    refused = 0
    for number in range(1_000):
        tampered = changed(document)
        if number % 4 == 3:
            at = chance.randrange(len(text))
            raw = (
                text[:at] + chr(33 + (ord(text[at]) + chance.randrange(90)) % 90) + text[at + 1 :]
            ).encode()
            if raw == text.encode() or text[at].isspace():
                raw = raw + b"}"
        else:
            *way, last = paths[number % len(paths)]
            holder: Any = tampered
            for name in way:
                holder = holder[name]
            if number % 4 == 0 and isinstance(holder, dict):
                del holder[last]
            else:
                holder[last] = another(holder[last], chance)
            raw = json.dumps(tampered).encode()
        with pytest.raises(CertificateError):
            verify(parse(raw))
        refused += 1
    assert refused == 1_000


@pytest.mark.parametrize(
    "name", ["verdict", "delta", "interval", "explanation", "judged_margin", "not_judged"]
)
def test_a_claim_that_the_curves_do_not_give_is_refused_whoever_signed_it(name: str) -> None:
    forged = changed(certificate(0.01))
    forged["claim"][name] = certificate(0.0)["claim"][name]
    with pytest.raises(CertificateError, match="curves"):
        verify(sign(forged, OTHER_KEY))


def test_another_signer_is_refused_if_one_is_named() -> None:
    document = sign(changed(certificate()), OTHER_KEY)
    assert verify(document).signer == fingerprint(OTHER_KEY)
    for signer in (fingerprint(KEY), fingerprint(OTHER_KEY)[:8], "x" * 64):
        with pytest.raises(CertificateError, match="signed by"):
            verify(document, signer=signer)


def test_another_method_that_gives_the_same_verdict_is_a_note() -> None:
    older = changed(certificate())
    older["method_version"], older["claim"]["delta"] = 1, 0.123
    verification = verify(sign(older, KEY))
    assert "the verdict is the same (made by fp8scope" in verification.note
    older["claim"]["verdict"] = "better"
    with pytest.raises(CertificateError, match="version 1 of the method"):
        verify(sign(older, KEY))


def test_rounding_of_another_machine_is_not_a_change() -> None:
    rounded = changed(certificate())
    rounded["claim"]["delta"] *= 1 + 1e-9
    assert verify(sign(rounded, KEY)).note == ""
    rounded["claim"]["delta"] *= 1 + 1e-4
    with pytest.raises(CertificateError, match="delta"):
        verify(sign(rounded, KEY))


def packed(values: Any) -> str:
    return base64.b64encode(zlib.compress(np.asarray(values, "<f8").tobytes())).decode()


MISSING = object()
UNSOUND: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "short": (("arrays", "losses"), packed(np.zeros(5)), "another length"),
    "inflated": (("arrays", "losses"), packed(np.zeros(10**7)), "another length"),
    "not base64": (("arrays", "losses"), "!", "is damaged"),
    "a number": (("arrays", "losses"), 7, "is not a text"),
    "not zlib": (("arrays", "losses"), base64.b64encode(b"x" * 99).decode(), "is damaged"),
    "equal steps": (("arrays", "steps"), packed(np.ones(POINTS)), "do not ascend"),
    "no steps": (("arrays", "steps"), packed(np.full(POINTS, np.nan)), "do not ascend"),
    "another array": (("arrays", "more"), packed(np.ones(POINTS)), "has the arrays"),
    "no losses": (("arrays", "losses"), MISSING, "has the arrays"),
    "digest": (("sha256", "losses"), "0" * 64, "digest"),
    "too many points": (("points",), 10**12, "points"),
    "no points": (("points",), 0, "points"),
    "state": (("state",), "great", "state"),
    "facts": (("facts",), [], "facts"),
    "negative steps": (("planned",), -3, "number of steps"),
    "no id": (("id",), MISSING, "damaged"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_curves_that_are_none_are_refused_whoever_signed_them(name: str) -> None:
    (*way, last), value, message = UNSOUND[name]
    forged = changed(certificate())
    holder = forged["arms"]["judged"][1]
    for entry in way:
        holder = holder[entry]
    holder.pop(last, None)
    if value is not MISSING:
        holder[last] = value
    with pytest.raises(CertificateError, match=message):
        verify(sign(forged, KEY))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "not a certificate"),
        (b'{"format": "other"}', "not a certificate"),
        (
            b'{"format": "fp8scope certificate", "format_version": 9, "fp8scope": "7.0"}',
            "version that made it, '7.0'",
        ),
        (b'{"format": "fp8scope certificate", "format_version": 1}', "too few"),
        (b'{"format": 1, "format": 2}', "same name"),
        (b'{"format": NaN}', "NaN"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_files_that_are_none_are_refused(raw: bytes, message: str) -> None:
    with pytest.raises(CertificateError, match=message):
        parse(raw)


@pytest.mark.parametrize("signature", [None, {}, "x", {"algorithm": "none", "public_key": "", "value": ""}])
def test_a_file_without_a_signature_is_refused(signature: Any) -> None:
    with pytest.raises(CertificateError, match="signature"):
        check_signature({**certificate(), "signature": signature})


def test_margins_in_nats_are_those_in_per_cent_of_the_loss() -> None:
    """A margin of m nats is the relative margin m / L at a baseline's loss L, in every number."""
    ours, theirs = arms(0.004)
    level = make(ours, theirs, Terms(), KEY, names=("a", "b"))["claim"]["baseline_loss"]
    in_nats = make(ours, theirs, Terms(margin_nats=0.02), KEY, names=("a", "b"))["claim"]
    relative = make(ours, theirs, Terms(margin=0.02 / level), KEY, names=("a", "b"))["claim"]
    assert in_nats["margin"] == pytest.approx(0.02 / level) and in_nats["margin_nats"] == 0.02
    for name in ("verdict", "delta", "interval", "tolerance", "p_value", "smallest_detectable", "outcome"):
        assert in_nats[name] == pytest.approx(relative[name]), name
    assert "±0.02 nats" in in_nats["explanation"]
    assert make(ours, theirs, Terms(margin_nats=0.001), KEY, names=("a", "b"))["claim"]["verdict"] == "worse"


def test_a_loss_near_zero_has_a_margin_in_nats() -> None:
    ours, theirs = (
        [replace(run, curve=replace(run.curve, losses=run.curve.losses - 2.0)) for run in arm]
        for arm in arms()
    )
    claim = make(ours, theirs, Terms(margin_nats=0.05), KEY, names=("a", "b"))["claim"]
    assert (claim["unit"], claim["margin"], claim["margin_nats"]) == ("nats", 0.05, 0.05)


def test_a_loss_that_is_not_finite_is_worse_by_any_margin() -> None:
    ours, theirs = arms()
    losses = ours[0].curve.losses.copy()
    losses[300:] = np.nan
    ours[0] = replace(ours[0], curve=replace(ours[0].curve, losses=losses))
    for terms in (Terms(), Terms(margin_nats=0.01)):
        document = make(ours, theirs, terms, KEY, names=("a", "b"))
        claim = verify(document).claim
        assert claim["verdict"] == "worse" and claim["outcome"] == "fail" and claim["delta"] is None


def test_a_run_that_has_not_ended_is_no_certificate_of_equivalence() -> None:
    ours, theirs = arms()
    ours[0] = replace(ours[0], standing=replace(ours[0].standing, state="running"))
    claim = make(ours, theirs, Terms(), KEY, names=("a", "b"))["claim"]
    assert claim["verdict"] != "equivalent" and claim["outcome"] == "undecided"
    assert claim["measured"] == "equivalent" and claim["reason"] == "The run has not finished yet."


def test_one_seed_is_told() -> None:
    ours, theirs = arms(seeds=1)
    claim = make(ours, theirs, Terms(), KEY, names=("a", "b"))["claim"]
    assert claim["looks"].startswith("The interval of the pair")
    assert any(sentence.startswith("An arm has one seed") for sentence in claim["not_judged"])


@pytest.mark.parametrize(
    ("verdict", "judged", "outcome"),
    [
        ("equivalent", 0.0025, "pass"),
        ("equivalent", 0.005, "undecided"),
        ("better", None, "pass"),
        ("worse", None, "fail"),
        ("cannot_tell", None, "undecided"),
        ("pending", 0.0025, "undecided"),
        ("incomplete", 0.0025, "undecided"),
    ],
)
def test_only_what_was_asked_for_passes(verdict: str, judged: float | None, outcome: str) -> None:
    assert outcome_of(verdict, judged, 0.0025) == outcome


@pytest.mark.parametrize(
    "terms",
    [
        {"margin": 0.0},
        {"margin": 2.0},
        {"margin": float("nan")},
        {"margin": True},
        {"margin_nats": -1.0},
        {"margin_nats": 1e6},
        {"alpha": 0.0},
        {"alpha": 0.9},
        {"prior": Prior(float("inf"), 3.0)},
        {"prior": Prior(0.001, 0.0)},
    ],
)
def test_terms_are_bounded(terms: dict[str, Any]) -> None:
    with pytest.raises(CertificateError, match="not between"):
        Terms(**terms)
    forged = changed(certificate())
    values = {name: vars(value) if isinstance(value, Prior) else value for name, value in terms.items()}
    if not any(isinstance(value, float) and not np.isfinite(value) for value in values.values()):
        forged["terms"].update({k: v for k, v in values.items() if k != "prior"})
        if forged["terms"] != certificate()["terms"]:
            with pytest.raises(CertificateError):
                verify(sign(forged, KEY))


def test_arms_are_bounded() -> None:
    ours, theirs = arms(seeds=1)
    with pytest.raises(CertificateError, match="65 runs"):
        make(ours * 65, theirs, Terms(), KEY, names=("a", "b"))
    with pytest.raises(CertificateError, match="0 runs"):
        make(ours, [], Terms(), KEY, names=("a", "b"))

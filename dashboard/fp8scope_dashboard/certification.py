"""`fp8scope verify` and `fp8scope certify-file`: certificates without a server.

Both need the `dashboard` extra, whose statistics they use; neither needs its database.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fp8scope_dashboard.certificates.claim import Terms
from fp8scope_dashboard.certificates.document import as_text, make, read
from fp8scope_dashboard.certificates.errors import CertificateError
from fp8scope_dashboard.certificates.gate import facts_of, junit, markdown, printable, title_of
from fp8scope_dashboard.certificates.signing import fingerprint, load_or_make_key
from fp8scope_dashboard.certificates.tables import LOSS, arm_of, read_table
from fp8scope_dashboard.certificates.verification import verify as verify_document
from fp8scope_dashboard.pages.certificate.sheet import sheet

VALID, REFUSED = 0, 1


def verify(argv: list[str]) -> int:
    """Check a certificate without a server: its signature, and the verdict computed again from its curves."""
    parser = argparse.ArgumentParser(prog="fp8scope verify", description=verify.__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--signer", default="", help="refuse other keys: the fingerprint, or 16 digits of it")
    parser.add_argument("--html", type=Path, help="write the certificate as one page")
    parser.add_argument("--junit", type=Path, help="write the outcome as JUnit XML")
    parser.add_argument("--markdown", type=Path, help="write it as Markdown")
    options = parser.parse_args(argv)
    try:
        document = read(options.file)
        verification = verify_document(document, signer=options.signer)
        for path, form in ((options.html, sheet), (options.junit, junit), (options.markdown, markdown)):
            if path is not None:
                path.write_text(form(document), encoding="utf-8")
    except (CertificateError, OSError) as error:
        print(f"fp8scope verify: refused: {error}", file=sys.stderr)
        return REFUSED
    print(f"valid: {printable(title_of(document['claim']))}")
    for name, value in facts_of(document):
        print(f"  {name}: {printable(value)}")
    print(f"  Signed by: {verification.signer}")
    if verification.note:
        print(f"  Note: {printable(verification.note)}")
    return VALID


def certify_file(argv: list[str]) -> int:
    """Certify runs whose losses are in a CSV or Parquet file, signed with this user's key."""
    parser = argparse.ArgumentParser(prog="fp8scope certify-file", description=certify_file.__doc__)
    parser.add_argument("curves", type=Path, help="a row for each run and step: run, step, loss, and group")
    parser.add_argument("judged", metavar="FP8_GROUP", help="a group of the file, or runs, with commas")
    parser.add_argument("baseline", metavar="BF16_GROUP")
    parser.add_argument("--loss", default="", help=f"the loss's column (default: {', '.join(LOSS)})")
    margin = parser.add_mutually_exclusive_group()
    margin.add_argument("--margin", default="0.25%", help="difference that counts as none (default: 0.25%%)")
    margin.add_argument("--margin-nats", type=float, help="the same in the unit of the loss: 0.01")
    parser.add_argument("--alpha", type=float, default=0.05, help="error rate (default: %(default)s)")
    parser.add_argument("--key", type=Path, required=True, help="PEM file of the key; made if there is none")
    parser.add_argument("-o", "--output", type=Path, default=Path("certificate.json"))
    options = parser.parse_args(argv)
    try:
        terms = Terms(margin=_share(options.margin), margin_nats=options.margin_nats, alpha=options.alpha)
        table = read_table(options.curves)
        arms = arm_of(table, options.judged, options.loss), arm_of(table, options.baseline, options.loss)
        names = options.judged, options.baseline
        key = load_or_make_key(options.key)
        document = make(*arms, terms, key, names=names)
        options.output.write_text(as_text(document), encoding="utf-8")
        options.output.with_suffix(".html").write_text(sheet(document), encoding="utf-8")
    except (CertificateError, OSError) as error:
        print(f"fp8scope certify-file: {error}", file=sys.stderr)
        return REFUSED
    print(f"{printable(title_of(document['claim']))}. {printable(document['claim']['explanation'])}")
    print(f"{options.output}: written, signed by {fingerprint(key)}", file=sys.stderr)
    return VALID


def _share(text: str) -> float:
    try:
        return float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        raise CertificateError(f"the margin {text!r:.40} is no number: 0.5% or 0.005") from None
